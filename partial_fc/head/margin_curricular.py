"""CurricularFace: the one margin whose negatives are not their cosines. The plain kernel forms its logits."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from partial_fc.head.margin import Margin, Negatives, State, angle
from partial_fc.head.margin_adaptive import moved


@dataclass(frozen=True, kw_only=True)
class HardCosines(Negatives):
    """The rule f of CurricularFace's negatives: f(cos) = cos * (t + cos) where cos > hard_G[g]."""

    hard_G: Tensor
    t: float
    is_cosine: ClassVar[bool] = False

    def __call__(self, cos_GK: Tensor) -> tuple[Tensor, Tensor | None]:
        hard = cos_GK > self.hard_G[:, None]
        value = torch.where(hard, cos_GK * (self.t + cos_GK), cos_GK)
        return self.filtered(value, cos_GK), torch.where(hard, self.t + 2 * cos_GK, 1.0)


@dataclass(frozen=True)
class CurricularFace(Margin):
    """Target class: cos(theta + m). Other classes that are nearer than that, the hard ones: cos * (t + cos), where t is
    the running mean of the target cosine, so they count more as training succeeds (https://arxiv.org/abs/2004.00288).

    momentum: what t keeps in a step; it starts as 0 and takes in the step's own mean before it is used. As the authors
    published it, theta > pi - m gives cos - m * sin(m), which falls on where cos(theta + m) would rise again (there
    is a jump), while the hard ones are told by cos(theta + m) everywhere.
    """

    m: float = 0.5
    momentum: float = 0.99
    needs_target_cosines: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.scale <= 0 or not 0 <= self.m <= math.pi / 2 or not 0 <= self.momentum < 1:
            raise ValueError(
                "CurricularFace takes scale > 0, 0 <= m <= pi / 2 and 0 <= momentum < 1; "
                f"got scale={self.scale}, m={self.m}, momentum={self.momentum}"
            )

    @property
    def bound(self) -> float:
        return max(2.0, 1.0 + self.m * math.sin(self.m))

    def state(self) -> State:
        return {"t": 0.0}

    def advance(self, state: State, norm_G: Tensor, target_cos_G: Tensor | None) -> State:
        assert target_cos_G is not None
        return {"t": moved(state["t"], target_cos_G.double().mean().item(), 1.0 - self.momentum)}

    def target(self, cos_N: Tensor, norm_N: Tensor, state: State) -> Tensor:
        far_N = cos_N <= math.cos(math.pi - self.m)
        return torch.where(far_N, cos_N - self.m * math.sin(self.m), torch.cos(angle(cos_N) + self.m))

    def negatives(self, target_cos_G: Tensor | None, state: State) -> Negatives:
        assert target_cos_G is not None
        return HardCosines(hard_G=torch.cos(angle(target_cos_G.detach()) + self.m), t=state["t"])
