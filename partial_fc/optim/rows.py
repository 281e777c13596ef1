"""Optimisers for class centres: they move the rows that a step has touched and no others.

A row that is not touched rests with its state; decay does not apply to it: it is as if the row had not lived in those
steps (the meaning that InsightFace's Partial FC gives it). Where every row takes part, each is its dense namesake.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class RowOptimizer(Protocol):
    """Knows no rows of its own: state is a tensor for each name, with a row for each centre."""

    def state(self, centre_LD: Tensor) -> dict[str, Tensor]:
        """The state of rows that were never touched."""

    def step(
        self, centre_LD: Tensor, state: dict[str, Tensor], row_S: Tensor | None, grad_SD: Tensor, lr: float
    ) -> None:
        """Updates the rows row_S (ascending, each once; None: all L, in order) in place. grad_SD is overwritten."""


@dataclass(frozen=True)
class RowSGD:
    """SGD with momentum: m' = momentum * m + (g + weight_decay * w); w' = w - lr * m', as torch.optim.SGD has it."""

    momentum: float = 0.9
    weight_decay: float = 5e-4

    def state(self, centre_LD: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(centre_LD)}

    def step(
        self, centre_LD: Tensor, state: dict[str, Tensor], row_S: Tensor | None, grad_SD: Tensor, lr: float
    ) -> None:
        centre_SD, momentum_SD = _take(row_S, centre_LD, state["momentum"])
        momentum_SD.mul_(self.momentum).add_(grad_SD.add_(centre_SD, alpha=self.weight_decay))
        centre_SD.add_(momentum_SD, alpha=-lr)
        _put_back(row_S, (centre_LD, centre_SD), (state["momentum"], momentum_SD))


@dataclass(frozen=True)
class RowAdamW:
    """AdamW (https://arxiv.org/abs/1711.05101), as torch.optim.AdamW has it; bias is corrected by the number of
    steps in which the row took part."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def state(self, centre_LD: Tensor) -> dict[str, Tensor]:
        return {
            "first_moment": torch.zeros_like(centre_LD),
            "second_moment": torch.zeros_like(centre_LD),
            "num_steps": centre_LD.new_zeros(len(centre_LD), 1),
        }

    def step(
        self, centre_LD: Tensor, state: dict[str, Tensor], row_S: Tensor | None, grad_SD: Tensor, lr: float
    ) -> None:
        names = ("first_moment", "second_moment", "num_steps")
        centre_SD, first_SD, second_SD, num_S1 = _take(row_S, centre_LD, *(state[name] for name in names))
        num_S1.add_(1)
        first_SD.lerp_(grad_SD, 1 - self.beta1)
        second_SD.mul_(self.beta2).addcmul_(grad_SD, grad_SD, value=1 - self.beta2)
        # In float64: 1 - 0.999 has only four digits left in float32.
        correct1_S1, correct2_S1 = (
            (1 - beta ** num_S1.double()).to(grad_SD.dtype) for beta in (self.beta1, self.beta2)
        )
        scale_SD = (second_SD / correct2_S1).sqrt_().add_(self.eps)
        centre_SD.mul_(1 - lr * self.weight_decay)
        centre_SD.addcdiv_(first_SD / correct1_S1, scale_SD, value=-lr)
        _put_back(
            row_S,
            (centre_LD, centre_SD),
            *((state[n], t) for n, t in zip(names, (first_SD, second_SD, num_S1), strict=True)),
        )


def _take(row_S: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """The rows to work on: copies, or the tensors themselves where all rows take part."""
    return [t if row_S is None else t[row_S] for t in tensors]


def _put_back(row_S: Tensor | None, *pairs: tuple[Tensor, Tensor]) -> None:
    if row_S is not None:
        for whole, rows in pairs:
            whole[row_S] = rows
