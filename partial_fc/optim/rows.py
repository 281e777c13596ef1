"""Optimisers for class centres: they move the rows that a step has touched and no others."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSGD:
    """SGD with momentum: m' = momentum * m + (g + weight_decay * w); w' = w - lr * m', as torch.optim.SGD has it.

    The momentum of a row that is not touched rests, and its decay does not apply: it is as if the row had not lived
    in those steps (the meaning that InsightFace's Partial FC gives it).
    """

    momentum: float = 0.9
    weight_decay: float = 5e-4

    def state(self, centre_LD: Tensor) -> dict[str, Tensor]:
        """One tensor for each name, with a row for each centre."""
        return {"momentum": torch.zeros_like(centre_LD)}

    def step(
        self, centre_LD: Tensor, state: dict[str, Tensor], row_S: Tensor | None, grad_SD: Tensor, lr: float
    ) -> None:
        """Updates the rows row_S (ascending, each once; None: all L, in order) in place. grad_SD is overwritten."""
        momentum_LD = state["momentum"]
        if row_S is None:
            grad_SD.add_(centre_LD, alpha=self.weight_decay)
            momentum_LD.mul_(self.momentum).add_(grad_SD)
            centre_LD.add_(momentum_LD, alpha=-lr)
            return
        centre_SD = centre_LD[row_S]
        momentum_SD = (
            momentum_LD[row_S].mul_(self.momentum).add_(grad_SD.add_(centre_SD, alpha=self.weight_decay))
        )
        momentum_LD[row_S] = momentum_SD
        centre_LD[row_S] = centre_SD.add_(momentum_SD, alpha=-lr)
