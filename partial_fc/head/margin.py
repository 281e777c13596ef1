"""Margins: pure functions of the cosine between a feature and its own class centre.

Each is written once, as differentiable tensor maths; the dense reference, the chunked path and the kernels take
value and slope from here.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Margin(Protocol):
    """logit = scale * margin(cos) for a row's own class, scale * cos for every other class."""

    @property
    def scale(self) -> float:
        """What cosines are multiplied by before the softmax."""

    @property
    def bound(self) -> float:
        """The largest |margin(cos)| possible."""

    def __call__(self, cos: Tensor) -> Tensor:
        """Cosines (any shape, floating) -> their values with the margin; differentiable."""


@dataclass(frozen=True)
class CombinedMargin:
    """cos(m1 * theta + m2) - m3 (ArcFace, https://arxiv.org/abs/1801.07698, eq. 4).

    As in InsightFace nothing is clipped: past theta = (pi - m2) / m1 the value rises again and the slope is negative.
    straight_through: the slope is taken as 1, as the implementations do that apply the margin outside of autograd.
    """

    scale: float = 64.0
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

    def __call__(self, cos: Tensor) -> Tensor:
        value = cos
        if (self.m1, self.m2) != (1.0, 0.0):
            # Where feature and centre are parallel the angle has no direction and its slope no finite value; one
            # float32 step inside, all is finite.
            edge = 1.0 - torch.finfo(torch.float32).eps
            value = torch.cos(self.m1 * torch.acos(cos.clamp(-edge, edge)) + self.m2)
        value = value - self.m3
        return cos + (value - cos).detach() if self.straight_through else value


def ArcFace(scale: float = 64.0, margin: float = 0.5, straight_through: bool = False) -> CombinedMargin:
    """cos(theta + margin) (https://arxiv.org/abs/1801.07698)."""
    return CombinedMargin(scale, m2=margin, straight_through=straight_through)


def CosFace(scale: float = 64.0, margin: float = 0.4) -> CombinedMargin:
    """cos(theta) - margin (https://arxiv.org/abs/1801.09414)."""
    return CombinedMargin(scale, m3=margin)


def Softmax(scale: float = 64.0) -> CombinedMargin:
    """No margin: the plain normalised softmax (NormFace, https://arxiv.org/abs/1704.06369)."""
    return CombinedMargin(scale)


def value_and_slope(margin: Margin, cos: Tensor) -> tuple[Tensor, Tensor]:
    """scale * margin(cos) and its derivative by cos, both of cos' shape, without a graph."""
    with torch.enable_grad():
        leaf = cos.detach().requires_grad_()
        value = margin.scale * margin(leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope


@dataclass(frozen=True)
class Negatives:
    """f of the classes that are not a row's own: their logit is scale * f(cos). As it stands: f(cos) = cos.

    filter_above: a class with a larger cosine is left out of the row's softmax (it may be the same person again).
    hard_G, hard_t: where cos > hard_G[g], f(cos) = cos * (hard_t + cos) (CurricularFace).
    """

    filter_above: float | None = None
    hard_G: Tensor | None = None
    hard_t: float = 0.0

    def __call__(self, cos_GK: Tensor) -> tuple[Tensor, Tensor | None]:
        """(f(cos), f'(cos), None where that is 1 everywhere); -inf where the class is left out."""
        value, slope = cos_GK, None
        if self.hard_G is not None:
            hard = cos_GK > self.hard_G[:, None]
            value = torch.where(hard, cos_GK * (self.hard_t + cos_GK), cos_GK)
            slope = torch.where(hard, self.hard_t + 2 * cos_GK, 1.0)
        if self.filter_above is not None:
            value = value.masked_fill(cos_GK > self.filter_above, -torch.inf)
        return value, slope
