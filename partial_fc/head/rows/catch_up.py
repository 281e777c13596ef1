"""Catch-up: applies to a row what a dense optimizer would have done in the steps in which it took no part.

A dense optimizer moves every row in every step: where the gradient is zero, weight decay and the momentum of earlier
gradients still act. A catch-up applies just that to rows that lag behind, before they take part again, so that the
centres are those of the dense optimizer and still only touched rows cost time. For it the learning rates of the steps
are kept, 8 bytes each, from the last step on that moved every row: in training without sampling there are none.
"""

import math
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from partial_fc.head.native.library import DTYPES, call, loaded
from partial_fc.head.rows.optimizers import RowAdamW, RowOptimizer, RowSGD

_NEVER = 2**31 - 1  # as "touched" holds it
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

    def closed_form(self) -> dict[str, Any] | None:
        """Returns the closed form as C++ takes it (native/catch_up.h); None: there is none."""
        return None

    def in_place(
        self, tables: dict[str, Tensor], row_S: Tensor | None, number_S: Tensor | None = None, first_row: int = 0,
        keys: dict[str, int] | None = None,
    ) -> bool:  # fmt: skip
        """Catches up rows of tables where they lie (row_S: ascending; None: all), as far as C++ does it, on a GPU all,
        without a wait for it; returns whether all are up to date now. number_S, first_row, keys: of the noise that
        rounds to bfloat16 (`RowTable.begin_fused_update`); number_S None: row_S."""
        form, centre = self.closed_form(), tables["centres"]
        if form is None or centre.dtype not in DTYPES or not all(t.is_contiguous() for t in tables.values()):
            return False
        wide = [name for name, width in self._optimizer.state_widths().items() if width == "row"]
        scalar = [name for name, width in self._optimizer.state_widths().items() if width == "scalar"]
        keys = keys or {}
        if centre.is_cuda and find_spec("triton"):
            from partial_fc.head.kernels.triton_catch_up import catch_up

            form |= {"first_step": self.first, "touched_step": self.num_steps}
            catch_up(form, tables, wide, row_S, number_S, first_row, keys)
            return True
        if not centre.is_cpu or not (compiled := loaded()):
            return False
        left = torch.zeros(1, dtype=torch.int64)
        rows = {"row": row_S, "number": number_S, "S": len(centre) if row_S is None else len(row_S)}
        call(compiled, "head_catch_up", {
            **form, **rows, "D": centre.shape[1], "first_row": first_row, "threads": torch.get_num_threads(),
            "centre": centre, "centre_dtype": DTYPES[centre.dtype], "centre_key": keys.get("centres", 0),
            "wide": tuple(tables[name].data_ptr() for name in wide), "wide_dtype": DTYPES[tables[wide[0]].dtype],
            "wide_key": tuple(keys.get(name, 0) for name in wide),
            "scalar": tuple(tables[name].data_ptr() for name in scalar),
            "touched": tables["touched"], "touched_step": self.num_steps, "first_step": self.first, "left": left,
        })  # fmt: skip
        return not left.item()

    def apply(self, centre_KD: Tensor, state: dict[str, Tensor], since_K: Tensor) -> None:
        """Makes the steps from since_K[k] on of row k, in place. since_K: ascending, `first` to `num_steps` - 1."""
        touched_K = since_K.int()
        if self.in_place({"centres": centre_KD, **state, "touched": touched_K}, None):
            return
        left_K = (touched_K < self.num_steps).nonzero().squeeze(1)
        rows, more = centre_KD[left_K], {name: t[left_K] for name, t in state.items()}
        grad_KD, oldest = torch.empty_like(rows), int(since_K[left_K[0]])
        counts = torch.bincount(since_K[left_K] - oldest).tolist()
        n = 0  # rows that have begun to lag behind by the step at hand: always the first ones
        for missed, lr in enumerate(self.rates[oldest - self.first :]):
            n += counts[missed] if missed < len(counts) else 0
            part = {name: t[:n] for name, t in more.items()}
            self._optimizer.step(rows[:n], part, grad_KD[:n].zero_(), lr)
        centre_KD[left_K] = rows
        for name, t in more.items():
            state[name][left_K] = t


class AdamWCatchUp(CatchUp):
    """AdamW in closed form, where it holds. With zero gradient, the j-th step since s, whose number is t, makes

        w = (1 - lr_t decay) w - lr_t beta1^j m / (1 - beta1^t) / (sqrt(v) / y_j + eps)
        y_j^2 = (1 - beta2^t) / beta2^j

    of a row whose own steps are the s that it stands for. So w' = P w - m sum_j B_j / (x + eps y_j), with x = sqrt(v),
    B_j = lr_t beta1^j y_j / (1 - beta1^t), and the decay of later steps in P and B. The y_j are near y_1 = c where B_j
    counts, so the sum is a series in z = eps c / (x + eps c), which is between 0 and 1 for any v:

        sum_k (-z)^k a_k / (x + eps c),  a_k = sum_j B_j (y_j / c - 1)^k

    P, five a_k and the rate of step s are kept for each s, once for all rows. A row that never took part has m = 0.
    Rows of the other first steps, when y_j still moves fast, rows that have rested, and float64 are caught up step by
    step, as all rows are where nothing is compiled.
    """

    _TERMS = 5  # the first term that is left out is below 1e-7 of the sum

    def __init__(self, optimizer: RowAdamW, rates: list[float], first: int, device: torch.device):
        super().__init__(optimizer, rates, first)
        self._adamw = optimizer
        memory = 1.3 / (1 - optimizer.beta1)  # (of the steps whose B_j count, the fifth root of the mean of j^5) / 2
        self.least = math.ceil(memory / 0.04) if memory * (1 - optimizer.beta2) <= 0.04 else _NEVER
        self._window = math.ceil(45 / -math.log(max(optimizer.beta1, 1e-9)))  # beta1^j below 1e-19
        num = len(rates)
        # [:, s - first] = P, a_0, a_1, ... of steps s to now, and the rate of s
        self._sums_FN = torch.zeros(2 + self._TERMS, num + 1, dtype=torch.float64)
        rate_N, since_N = torch.tensor(rates, dtype=torch.float64), torch.arange(first, first + num)
        keep_N = 1 - optimizer.weight_decay * rate_N
        later_N = torch.cat((keep_N.flip(0).cumprod(0).flip(0), keep_N.new_ones(1)))  # P of steps s to now
        self._sums_FN[0], self._sums_FN[-1, :num] = later_N, rate_N
        for j in range(1, min(num, self._window) + 1):
            self._sums_FN[1:-1, : num - j + 1] += self._terms(since_N[: num - j + 1], j, rate_N[j - 1 :]) * later_N[j:]
        self._sums_FN = self._sums_FN.to(device)

    def _terms(self, since_N: Tensor, j: Tensor | int, lr: Tensor | float) -> Tensor:
        """Returns what the j-th step since each of these adds to a_0, a_1, ..."""
        adamw, t_N = self._adamw, since_N + j
        y_N = self._y(since_N, j)
        B_N = lr * adamw.beta1**j * y_N / (1 - adamw.beta1 ** t_N.double())
        return B_N * (y_N / self._y(since_N, 1) - 1) ** torch.arange(self._TERMS)[:, None]

    def _y(self, since_N: Tensor, j: Tensor | int) -> Tensor:
        beta2 = self._adamw.beta2
        return ((1 - beta2 ** (since_N + j).double()) / beta2**j).sqrt()

    def record(self, lr: float) -> None:
        num = len(self.rates) + 1
        if num == self._sums_FN.shape[1]:
            self._sums_FN = torch.cat((self._sums_FN, self._sums_FN.new_zeros(2 + self._TERMS, num + 1024)), dim=1)
        self._sums_FN[:-1, :num] *= 1 - lr * self._adamw.weight_decay
        self._sums_FN[0, num], self._sums_FN[-1, num - 1] = 1.0, lr
        begin = max(0, num - self._window)
        since_N = torch.arange(self.first + begin, self.first + num)
        terms_FN = self._terms(since_N, self.first + num - since_N, lr)  # few: on the CPU
        self._sums_FN[1:-1, begin:num] += terms_FN.to(self._sums_FN.device, non_blocking=True)
        super().record(lr)

    def forget(self) -> None:
        super().forget()
        self._sums_FN = self._sums_FN.new_zeros(2 + self._TERMS, 1)
        self._sums_FN[0] = 1.0

    def closed_form(self) -> dict[str, Any] | None:
        if not self._adamw.eps:
            return None
        adamw, sums_FN = self._adamw, self._sums_FN
        betas = {"fade1": adamw.beta1, "fade2": adamw.beta2, "eps": adamw.eps, "weight_decay": adamw.weight_decay}
        return {"optimizer": 1, **betas, "least_step": self.least, "sums": sums_FN, "sums_stride": sums_FN.stride(0)}


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

    def closed_form(self) -> dict[str, Any]:
        return {"optimizer": 0, "sums": self._product_4N, "sums_stride": self._product_4N.stride(0)}


def make(
    optimizer: RowOptimizer, device: torch.device, rates: list[float] | None = None, first: int = 0
) -> CatchUp | None:
    """Returns the catch-up of an optimizer after these steps; None: a zero gradient moves nothing, so there is nothing
    to do."""
    if not optimizer.moves_without_gradient:
        return None
    if isinstance(optimizer, RowSGD):
        return SGDCatchUp(optimizer, rates or [], first, device)
    if isinstance(optimizer, RowAdamW):
        return AdamWCatchUp(optimizer, rates or [], first, device)
    return CatchUp(optimizer, rates or [], first)


def _multiply(a: _Matrix, b: _Matrix) -> _Matrix:
    """The product of two 2x2 matrices (ww, wm, mw, mm), of numbers or of equally long tensors of them."""
    return (a[0] * b[0] + a[1] * b[2], a[0] * b[1] + a[1] * b[3], a[2] * b[0] + a[3] * b[2], a[2] * b[1] + a[3] * b[3])
