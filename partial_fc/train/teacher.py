"""Distillation: the embeddings' distance to a trained model's, as a part of the loss (--teacher)."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from partial_fc.comm import World


class Teacher:
    """weight * mean(1 - cos(output, forward(input))) over the samples of all ranks.

    forward: a loader's batch -> embeddings (B, D), without gradient. autocast: the context that it runs in.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        weight: float,
        world: World,
        autocast: Callable[[], AbstractContextManager],
    ):
        self._forward, self._weight, self._world, self._autocast = forward, weight, world, autocast
        self._updates = 0.0  # since the last `drain`, as is their loss
        self._loss = torch.zeros((), dtype=torch.float64)

    def __call__(self, output_BD: Tensor, input_B: Tensor, num_global: int, share: float) -> Tensor:
        """Returns share of the loss, equal on all ranks; its gradient is that of this rank's samples, as the head's.
        num_global: samples of this batch on all ranks. One collective."""
        with torch.no_grad(), self._autocast():
            target_BD = self._forward(input_B).to(output_BD.dtype)
        # In float64, where the sum of fp32 numbers does not depend on their order, nor on the number of ranks.
        own = (1 - F.cosine_similarity(output_BD, target_BD)).double().sum()
        factor = share * self._weight / num_global
        total = self._world.all_reduce(own.detach(), name="train/teacher") * factor
        self._loss = self._loss.to(total.device) + total  # the host does not wait for it
        self._updates += share
        return total + factor * (own - own.detach())

    def drain(self) -> float:
        """Returns the mean over the updates since the last call."""
        mean = self._loss.item() / (self._updates or 1.0)
        self._loss, self._updates = torch.zeros_like(self._loss), 0.0
        return mean
