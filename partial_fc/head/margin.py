"""Margins: rules that replace the cosine between a feature and its target class centre in the softmax.

Each is written once, as differentiable tensor maths; the dense reference, the chunked path and the kernels take
value and slope from here. margin_adaptive.py has those that remember something between the steps.

Letters: N rows, G rows of the global batch, K classes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

State = dict[str, float]

# Where feature and centre are parallel the angle has no direction and its slope no finite value; one float32 step
# inside, all is finite.
EDGE = 1.0 - torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Negatives:
    """The rule f of the classes that are not a row's target: their logit is scale * f(cos). By default f(cos) = cos.

    filter_above: a class with a larger cosine is left out of the row's softmax (it may be the same person again).
    """

    filter_above: float | None = None

    # Whether f is the cosine but for the filter: of another f only the plain kernel forms logits.
    is_cosine: ClassVar[bool] = True

    def __call__(self, cos_GK: Tensor) -> tuple[Tensor, Tensor | None]:
        """(f(cos), f'(cos), None where that is 1 everywhere); -inf where the class is left out."""
        return self.filtered(cos_GK, cos_GK), None

    def filtered(self, value_GK: Tensor, cos_GK: Tensor) -> Tensor:
        """Returns -inf where the class is left out."""
        if self.filter_above is None:
            return value_GK
        return value_GK.masked_fill(cos_GK > self.filter_above, -torch.inf)


@dataclass(frozen=True)
class Margin(ABC):
    """A rule for logits: scale * target(cos) for a row's target class, scale * negatives(cos) for every other one. By
    default it remembers nothing and leaves the other classes' cosines as they are."""

    scale: float = 64.0  # what cosines are multiplied by before the softmax

    # Whether `advance` or `negatives` read the target cosines of all rows: one more all-reduce, of G float64.
    needs_target_cosines: ClassVar[bool] = False

    @property
    @abstractmethod
    def bound(self) -> float:
        """The largest |value| possible, of a target or of a negative."""

    @property
    def slope_is_one(self) -> bool:
        """Whether `target` has the slope 1 at every cosine, so that it need not be differentiated."""
        return False

    @abstractmethod
    def target(self, cos_N: Tensor, norm_N: Tensor, state: State) -> Tensor:
        """Returns the values with the margin of the cosines with the target class, of cos_N's shape and dtype;
        differentiable by cos_N. norm_N: lengths of those rows' features, constants through which no gradient flows."""

    def negatives(self, target_cos_G: Tensor | None, state: State) -> Negatives:
        """The rule of the other classes."""
        return Negatives()

    def state(self) -> State:
        """Returns the margin's state at the start of training; {} if it has none."""
        return {}

    def advance(self, state: State, norm_G: Tensor, target_cos_G: Tensor | None) -> State:
        """Returns this step's state, given the previous one; called once in every forward of training, before the state
        is used. norm_G: lengths of the features, target_cos_G: target cosines (only where needed), both of the whole
        global batch, so that the result is equal on all ranks."""
        return state


@dataclass(frozen=True)
class CombinedMargin(Margin):
    """The margin cos(m1 * theta + m2) - m3 (ArcFace, https://arxiv.org/abs/1801.07698, eq. 4).

    As in InsightFace nothing is clipped: past theta = (pi - m2) / m1 the value rises again and the slope is negative.
    straight_through: the slope is taken as 1, as the implementations do that apply the margin outside of autograd.
    """

    m1: float = 1.0
    m2: float = 0.0
    m3: float = 0.0
    straight_through: bool = False

    def __post_init__(self) -> None:
        if self.scale <= 0 or self.m1 <= 0:
            raise ValueError(f"scale and m1 must be positive; got scale={self.scale}, m1={self.m1}")

    @property
    def bound(self) -> float:
        return 1.0 + abs(self.m3)

    @property
    def slope_is_one(self) -> bool:
        return self.straight_through or (self.m1, self.m2) == (1.0, 0.0)

    def target(self, cos_N: Tensor, norm_N: Tensor, state: State) -> Tensor:
        value_N = cos_N
        if (self.m1, self.m2) != (1.0, 0.0):
            value_N = torch.cos(self.m1 * angle(cos_N) + self.m2)
        value_N = value_N - self.m3
        return cos_N + (value_N - cos_N).detach() if self.straight_through else value_N


def ArcFace(scale: float = 64.0, margin: float = 0.5, straight_through: bool = False) -> CombinedMargin:
    """Returns the margin cos(theta + margin) (https://arxiv.org/abs/1801.07698)."""
    return CombinedMargin(scale, m2=margin, straight_through=straight_through)


def CosFace(scale: float = 64.0, margin: float = 0.4) -> CombinedMargin:
    """Returns the margin cos(theta) - margin (https://arxiv.org/abs/1801.09414)."""
    return CombinedMargin(scale, m3=margin)


def Softmax(scale: float = 64.0) -> CombinedMargin:
    """Returns the rule without a margin: the normalised softmax (NormFace, https://arxiv.org/abs/1704.06369)."""
    return CombinedMargin(scale)


def angle(cos: Tensor) -> Tensor:
    """Returns arccos with a finite slope everywhere: constant beyond one float32 step from -1 and 1."""
    return torch.acos(cos.clamp(-EDGE, EDGE))


def value_and_slope(margin: Margin, cos_N: Tensor, norm_N: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Returns scale * target(cos) and its derivative by cos, both of cos_N's shape, without a graph."""
    if margin.slope_is_one:
        with torch.no_grad():
            return margin.scale * margin.target(cos_N, norm_N, state), torch.full_like(cos_N, margin.scale)
    with torch.enable_grad():
        leaf_N = cos_N.detach().requires_grad_()
        value_N = margin.scale * margin.target(leaf_N, norm_N, state)
        (slope_N,) = torch.autograd.grad(value_N.sum(), leaf_N)
    return value_N.detach(), slope_N
