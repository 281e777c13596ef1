"""Optimizers for class centres: the update of one step, on the rows that take part in it.

They know nothing of where rows lie or in which dtype they rest: table.py hands them working copies and puts the
results back. Where every row takes part in every step, each is its dense namesake. A row that takes no part is moved by
catch_up.py as that one moves it, as in arcface_torch, or rests with its state, as in InsightFace's trainer of 2020.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Width = Literal["row", "scalar"]


class RowOptimizer(ABC):
    """The rule of one step; it keeps no rows itself. The state of rows that were never touched is all zeros."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("momentum", "beta1", "beta2") and not 0.0 <= value < 1.0:
                raise ValueError(f"{name} is {value}; expected 0 <= {name} < 1")
            if name in ("eps", "weight_decay") and not value >= 0.0:
                raise ValueError(f"{name} is {value}; expected 0 or more")

    @property
    def moves_without_gradient(self) -> bool:
        """Whether a step with a zero gradient changes a row or its state."""
        return True

    @abstractmethod
    def state_widths(self) -> dict[str, Width]:
        """Returns, by the name of each state tensor, "row" for (rows, D), "scalar" for (rows, 1)."""

    @abstractmethod
    def step(self, centre_KD: Tensor, state: dict[str, Tensor], grad_KD: Tensor, lr: float) -> None:
        """Makes one step of all K rows, in place. Everything is float32 (float64 in checks); grad_KD is overwritten."""


@dataclass(frozen=True)
class RowSGD(RowOptimizer):
    """SGD: m' = momentum * m + d, where d = g + weight_decay * w; w' = w - lr * m', as torch.optim.SGD has it.

    nesterov: w' = w - lr * (d + momentum * m').
    """

    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov with momentum 0 is plain SGD: give a momentum, or leave nesterov off")

    @property
    def moves_without_gradient(self) -> bool:
        return self.momentum > 0 or self.weight_decay > 0

    def state_widths(self) -> dict[str, Width]:
        return {"momentum": "row"}

    def step(self, centre_KD: Tensor, state: dict[str, Tensor], grad_KD: Tensor, lr: float) -> None:
        momentum_KD = state["momentum"]
        grad_KD.add_(centre_KD, alpha=self.weight_decay)
        momentum_KD.mul_(self.momentum).add_(grad_KD)
        if self.nesterov:
            momentum_KD = grad_KD.add_(momentum_KD, alpha=self.momentum)
        centre_KD.add_(momentum_KD, alpha=-lr)


@dataclass(frozen=True)
class RowAdamW(RowOptimizer):
    """AdamW (https://arxiv.org/abs/1711.05101), as torch.optim.AdamW has it; bias is corrected by the number of
    steps in which the row took part."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01

    def state_widths(self) -> dict[str, Width]:
        return {"first_moment": "row", "second_moment": "row", "num_steps": "scalar"}

    def step(self, centre_KD: Tensor, state: dict[str, Tensor], grad_KD: Tensor, lr: float) -> None:
        first_KD, second_KD = state["first_moment"], state["second_moment"]
        num_K1 = state["num_steps"].add_(1)
        # In float64: 1 - 0.999 has only four digits left in float32.
        correct1_K1, correct2_K1 = ((1 - b ** num_K1.double()).to(num_K1.dtype) for b in (self.beta1, self.beta2))
        first_KD.lerp_(grad_KD, 1 - self.beta1)
        second_KD.mul_(self.beta2).addcmul_(grad_KD, grad_KD, value=1 - self.beta2)
        scale_KD = torch.div(second_KD, correct2_K1, out=grad_KD).sqrt_().add_(self.eps).mul_(correct1_K1)
        centre_KD.mul_(1 - lr * self.weight_decay).addcdiv_(first_KD, scale_KD, value=-lr)


@dataclass(frozen=True)
class RowAdagrad(RowOptimizer):
    """Row-wise Adagrad: a' = a + mean(d^2), one number a row, where d = g + weight_decay * w;
    w' = w - lr * d / (sqrt(a') + eps). (FBGEMM's exact row-wise Adagrad with its L2 decay.)"""

    eps: float = 1e-8
    weight_decay: float = 0.0

    @property
    def moves_without_gradient(self) -> bool:
        return self.weight_decay > 0

    def state_widths(self) -> dict[str, Width]:
        return {"square_sum": "scalar"}

    def step(self, centre_KD: Tensor, state: dict[str, Tensor], grad_KD: Tensor, lr: float) -> None:
        grad_KD.add_(centre_KD, alpha=self.weight_decay)
        square_sum_K1 = state["square_sum"]
        square_sum_K1.add_(grad_KD.square().mean(dim=1, keepdim=True))
        # A row whose gradients were all 0 stays, also with eps 0.
        scale_K1 = square_sum_K1.sqrt().add_(self.eps)
        centre_KD.addcdiv_(grad_KD, scale_K1.masked_fill_(scale_K1 == 0, 1.0), value=-lr)


_KINDS: dict[str, type[RowOptimizer]] = {k.__name__: k for k in (RowSGD, RowAdamW, RowAdagrad)}


def from_repr(text: object) -> RowOptimizer:
    """Returns the optimizer with this repr, as in a checkpoint's manifest. Raises ValueError for anything else."""
    found = re.fullmatch(r"(\w{1,20})\((.{0,200})\)", str(text))
    try:
        if not found:
            raise ValueError
        settings = dict(re.findall(r"(\w+)=([^ ,]+)", found[2]))
        values = {name: value == "True" if name == "nesterov" else float(value) for name, value in settings.items()}
        return _KINDS[found[1]](**values)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{str(text)[:200]!r}; expected one of {', '.join(_KINDS)} with its settings") from None
