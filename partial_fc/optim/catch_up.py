"""What a dense optimiser would have done to a row in the steps in which it took no part.

A dense optimiser moves every row in every step: where the gradient is zero, weight decay and the momentum of earlier
gradients still act. A catch-up applies just that to rows that lag behind, before they take part again, so that the
centres are those of the dense optimiser and still only touched rows cost time. For it the learning rate of every step
is kept: 8 bytes a step.
"""

from typing import Protocol

import torch
from torch import Tensor

from partial_fc.optim.rows import RowAdagrad, RowOptimizer, RowSGD


class CatchUp(Protocol):
    rates: list[float]  # the learning rate of every step so far

    def record(self, lr: float) -> None:
        """One more step was made, with this learning rate."""

    def apply(self, centre_KD: Tensor, state: dict[str, Tensor], since_K: Tensor, step: int) -> None:
        """Steps since_K[k] to step - 1 for each row k, in place. since_K: integers, ascending, all below `step`."""


def make(optimizer: RowOptimizer, rates: list[float], device: torch.device) -> CatchUp | None:
    """None: a zero gradient moves nothing, so there is nothing to make up for."""
    if isinstance(optimizer, RowSGD):
        return SGDCatchUp(optimizer, rates, device)
    if isinstance(optimizer, RowAdagrad) and not optimizer.weight_decay:
        return None
    return StepByStep(optimizer, rates)


class SGDCatchUp:
    """SGD in closed form: with zero gradient a step maps (w, m) linearly, for all elements and rows alike, so the
    steps from s to now are one 2x2 matrix. One matrix for each s is kept, and multiplied on as steps are made:
    O(steps so far) numbers, once a step, and O(1) for each element of a row that lags behind, however far."""

    def __init__(self, optimizer: RowSGD, rates: list[float], device: torch.device):
        self.rates: list[float] = []
        self._optimizer = optimizer
        # [s] = (ww, wm, mw, mm) of the product of steps s to now: w' = ww * w + wm * m, m' = mw * w + mm * m
        self._product_N4 = torch.empty(0, 4, dtype=torch.float64, device=device)
        for lr in rates:
            self.record(lr)

    def record(self, lr: float) -> None:
        if len(self.rates) + 1 > len(self._product_N4):
            grown = self._product_N4.new_empty(2 * len(self.rates) + 1024, 4)
            self._product_N4 = torch.cat((self._product_N4[: len(self.rates)], grown))
        decay, momentum = self._optimizer.weight_decay, self._optimizer.momentum
        # m' = momentum * m + decay * w;  w' = w - lr * (m', or decay * w + momentum * m' with nesterov)
        pull_w, pull_m = decay, momentum
        if self._optimizer.nesterov:
            pull_w, pull_m = decay + momentum * decay, momentum * momentum
        step_22 = self._product_N4.new_tensor([[1 - lr * pull_w, -lr * pull_m], [decay, momentum]])
        now = len(self.rates)
        self._product_N4[now] = self._product_N4.new_tensor([1.0, 0.0, 0.0, 1.0])
        product_N22 = self._product_N4[: now + 1].view(-1, 2, 2)
        product_N22.copy_(step_22 @ product_N22)
        self.rates.append(lr)

    def apply(self, centre_KD: Tensor, state: dict[str, Tensor], since_K: Tensor, step: int) -> None:
        assert step == len(self.rates)
        momentum_KD = state["momentum"]
        product_K4 = self._product_N4.index_select(0, since_K).to(centre_KD.dtype)
        ww_K1, wm_K1, mw_K1, mm_K1 = product_K4.split(1, dim=1)
        pull_KD = momentum_KD * wm_K1
        momentum_KD.mul_(mm_K1).addcmul_(centre_KD, mw_K1)
        centre_KD.mul_(ww_K1).add_(pull_KD)


class StepByStep:
    """Every missed step with a zero gradient, in order: for optimisers without a closed form. A row costs as much as
    the dense optimiser would have spent on it."""

    def __init__(self, optimizer: RowOptimizer, rates: list[float]):
        self.rates = list(rates)
        self._optimizer = optimizer

    def record(self, lr: float) -> None:
        self.rates.append(lr)

    def apply(self, centre_KD: Tensor, state: dict[str, Tensor], since_K: Tensor, step: int) -> None:
        grad_KD = torch.empty_like(centre_KD)
        oldest, counts = int(since_K[0]), torch.bincount(since_K - since_K[0]).tolist()
        n = 0  # rows that have begun to lag behind by the step at hand: always the first ones
        for missed in range(oldest, step):
            n += counts[missed - oldest] if missed - oldest < len(counts) else 0
            part = {name: t[:n] for name, t in state.items()}
            self._optimizer.step(centre_KD[:n], part, grad_KD[:n].zero_(), self.rates[missed])
