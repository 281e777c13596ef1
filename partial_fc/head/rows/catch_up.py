"""Catch-up: applies to a row what a dense optimizer would have done in the steps in which it took no part.

A dense optimizer moves every row in every step: where the gradient is zero, weight decay and the momentum of earlier
gradients still act. A catch-up applies just that to rows that lag behind, before they take part again, so that the
centres are those of the dense optimizer and still only touched rows cost time. For it the learning rates of the steps
are kept, 8 bytes each, from the last step on that moved every row: in training without sampling there are none.
"""

from typing import Any

import torch
from torch import Tensor

from partial_fc.head.rows.optimizers import RowOptimizer, RowSGD

_Matrix = tuple[Any, ...]  # 2x2, as (ww, wm, mw, mm)


class CatchUp:
    """Every missed step with a zero gradient, in order: for optimizers without a closed form. A row costs as much as
    the dense optimizer would have spent on it."""

    def __init__(self, optimizer: RowOptimizer, rates: list[float], first: int):
        self.rates = list(rates)  # the learning rates of steps `first` to `num_steps` - 1
        self.first = first
        self._optimizer = optimizer

    @property
    def num_steps(self) -> int:
        """Returns how many steps were made."""
        return self.first + len(self.rates)

    def record(self, lr: float) -> None:
        """Counts one more step, with this learning rate."""
        self.rates.append(lr)

    def forget(self) -> None:
        """Drops the learning rates so far: no row lags behind."""
        self.first, self.rates = self.num_steps, []

    def late(self, touched_L: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (rows that lag behind, the step since which each does), those that lag the most first; touched_L: the
        steps that each row stands for. A row of an older step than `first` was made since then."""
        late_K = (touched_L < self.num_steps).nonzero().squeeze(1)
        since_K = touched_L[late_K].clamp(min=self.first)
        order_K = since_K.argsort(stable=True)
        return late_K[order_K], since_K[order_K]

    def apply(self, centre_KD: Tensor, state: dict[str, Tensor], since_K: Tensor) -> None:
        """Makes the steps from since_K[k] on of row k, in place. since_K: ascending, `first` to `num_steps` - 1."""
        grad_KD = torch.empty_like(centre_KD)
        oldest, counts = int(since_K[0]), torch.bincount(since_K - since_K[0]).tolist()
        n = 0  # rows that have begun to lag behind by the step at hand: always the first ones
        for missed, lr in enumerate(self.rates[oldest - self.first :]):
            n += counts[missed] if missed < len(counts) else 0
            part = {name: t[:n] for name, t in state.items()}
            self._optimizer.step(centre_KD[:n], part, grad_KD[:n].zero_(), lr)


class SGDCatchUp(CatchUp):
    """SGD in closed form: with zero gradient a step maps (w, m) linearly, for all elements and rows alike, so the
    steps from s to now are one 2x2 matrix. One matrix for each s is kept, and multiplied on as steps are made:
    O(steps so far) numbers, once a step, and O(1) for each element of a row that lags behind, however far."""

    def __init__(self, optimizer: RowSGD, rates: list[float], first: int, device: torch.device):
        super().__init__(optimizer, rates, first)
        self._sgd = optimizer
        # From the last step back, O(steps). `record` goes forward, so a restart may change the last bit of a float64;
        # one in 10^8 of those is another float32.
        product: _Matrix = (1.0, 0.0, 0.0, 1.0)
        products = [product]
        for lr in reversed(rates):
            product = _multiply(product, self._step(lr))
            products.append(product)
        # [:, s - first] = (ww, wm, mw, mm) of steps s to now: w' = ww * w + wm * m, m' = mw * w + mm * m
        self._product_4N = torch.tensor(products[::-1], dtype=torch.float64, device=device).T.contiguous()

    def _step(self, lr: float) -> _Matrix:
        """m' = momentum * m + decay * w;  w' = w - lr * m', with nesterov w - lr * (decay * w + momentum * m')."""
        decay, momentum = self._sgd.weight_decay, self._sgd.momentum
        if self._sgd.nesterov:
            return 1 - lr * (decay + momentum * decay), -lr * momentum * momentum, decay, momentum
        return 1 - lr * decay, -lr * momentum, decay, momentum

    def record(self, lr: float) -> None:
        now = len(self.rates)
        if now + 1 == self._product_4N.shape[1]:
            self._product_4N = torch.cat((self._product_4N, self._product_4N.new_zeros(4, now + 1024)), dim=1)
        self._product_4N[:, : now + 1] = torch.stack(_multiply(self._step(lr), self._product_4N[:, : now + 1].unbind()))
        self._product_4N[0, now + 1] = self._product_4N[3, now + 1] = 1.0
        super().record(lr)

    def forget(self) -> None:
        super().forget()
        self._product_4N = self._product_4N.new_tensor((1.0, 0.0, 0.0, 1.0)).unsqueeze(1)

    def apply(self, centre_KD: Tensor, state: dict[str, Tensor], since_K: Tensor) -> None:
        momentum_KD = state["momentum"]
        product_4K = self._product_4N.index_select(1, since_K - self.first).to(centre_KD.dtype)
        ww_K1, wm_K1, mw_K1, mm_K1 = product_4K.unsqueeze(2).unbind()
        from_momentum_KD = momentum_KD * wm_K1
        momentum_KD.mul_(mm_K1).addcmul_(centre_KD, mw_K1)
        centre_KD.mul_(ww_K1).add_(from_momentum_KD)


def make(
    optimizer: RowOptimizer, device: torch.device, rates: list[float] | None = None, first: int = 0
) -> CatchUp | None:
    """Returns the catch-up of an optimizer after these steps; None: a zero gradient moves nothing, so there is nothing
    to do."""
    if not optimizer.moves_without_gradient:
        return None
    if isinstance(optimizer, RowSGD):
        return SGDCatchUp(optimizer, rates or [], first, device)
    return CatchUp(optimizer, rates or [], first)


def _multiply(a: _Matrix, b: _Matrix) -> _Matrix:
    """The product of two 2x2 matrices (ww, wm, mw, mm), of numbers or of equally long tensors of them."""
    return (a[0] * b[0] + a[1] * b[2], a[0] * b[1] + a[1] * b[3], a[2] * b[0] + a[3] * b[2], a[2] * b[1] + a[3] * b[3])
