"""Margins that adapt during training: they keep one or two running means between the steps.

Their state is a few numbers, equal on all ranks, since every rank sees the global batch's numbers they come from.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from partial_fc.head.margin import Margin, State, angle

# Lengths of features count as AdaFace's authors let them: not below and not above these.
_SHORTEST, _LONGEST = 1e-3, 100.0


@dataclass(frozen=True)
class AdaFace(Margin):
    """The margin cos(theta - m * q) - (m + m * q), where q in [-1, 1] is the quality of the image: how long its feature
    is compared with others, h * (length - mean) / deviation (https://arxiv.org/abs/2204.00964, eq. 15 to 18).

    Mean and deviation run over the global batches; weight is the share of the newest one (t_alpha in the published
    training), they start as 20 and 100. As published, lengths are limited to 0.001 to 100 and the angle with its
    margin to 0 to pi: where it would leave that range the slope is 0. A batch of one row leaves the deviation as it is.
    """

    m: float = 0.4
    h: float = 0.333
    weight: float = 0.01

    def __post_init__(self) -> None:
        if self.scale <= 0 or self.m < 0 or self.h <= 0 or not 0 < self.weight <= 1:
            raise ValueError(
                "AdaFace takes scale > 0, m >= 0, h > 0 and 0 < weight <= 1; "
                f"got scale={self.scale}, m={self.m}, h={self.h}, weight={self.weight}"
            )

    @property
    def bound(self) -> float:
        return 1.0 + 2.0 * self.m

    def state(self) -> State:
        return {"mean": 20.0, "deviation": 100.0}

    def advance(self, state: State, norm_G: Tensor, target_cos_G: Tensor | None) -> State:
        length_G = norm_G.double().clamp(_SHORTEST, _LONGEST)
        deviation = length_G.std().item() if len(length_G) > 1 else state["deviation"]
        return {
            "mean": moved(state["mean"], length_G.mean().item(), self.weight),
            "deviation": moved(state["deviation"], deviation, self.weight),
        }

    def target(self, cos_N: Tensor, norm_N: Tensor, state: State) -> Tensor:
        length_N = norm_N.detach().to(cos_N.dtype).clamp(_SHORTEST, _LONGEST)
        quality_N = (length_N - state["mean"]) / (state["deviation"] + 1e-3) * self.h
        shift_N = self.m * quality_N.clamp(-1.0, 1.0)
        theta_N = (angle(cos_N) - shift_N).clamp(0.0, math.pi)
        return torch.cos(theta_N) - (self.m + shift_N)


def moved(mean: float, new: float, weight: float) -> float:
    """Returns the running mean after one more value. weight: of that value."""
    return (1.0 - weight) * mean + weight * new
