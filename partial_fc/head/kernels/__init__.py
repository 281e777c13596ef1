"""The kernels: each rank's part of the softmax. `choice.choose(impl, ...)` returns one.

Every kernel makes the same two passes over this rank's (G, S) logits, which never exist as a whole: `sums`, for the
loss and the features' gradient, and `centre_gradients`, chunk by chunk. plain.py is the definition, in PyTorch; the
others are tested against it, and all of them against reference.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from partial_fc.head.kernels.nearest import Nearest
from partial_fc.head.margin import Negatives
from partial_fc.head.selection.sampling import Draw
from partial_fc.head.shard import Shard

if TYPE_CHECKING:
    from partial_fc.head.rows import RowTable

Impl = Literal["auto", "plain", "cpu", "triton"]
Precision = Literal["fp32", "bf16"]
AutoPrecision = Literal["auto", "fp32", "bf16"]


@dataclass(frozen=True)
class Logits:
    """Describes the logits scale * f(cos(feature g, centre c)), where f is the margin's `Negatives`,
    without computing them.

    Each row's target class is left out (its logit has the margin and is one number a row: softmax.py adds it), or each
    of its T target classes, and so is what `negatives` filters. Features and centres of length 0 have cosine 0 with
    everything.
    """

    unit_GD: Tensor  # features of length 1 (or 0): float32 or float64, the dtype that is computed in
    centre_LD: Tensor  # this rank's centres as they are stored, of any length
    row_S: Tensor | None  # int64, ascending: the active rows; None: all
    # int64, (G,) or (G, T), no class twice in a row: position in row_S of the target centre; -1: another rank has it
    target_G: Tensor
    scale: float
    negatives: Negatives
    # Positions k * sub_centres ... + sub_centres - 1 of row_S are one class; its logit is that of the nearest of them.
    sub_centres: int = 1

    @property
    def num_sampled(self) -> int:
        return len(self.centre_LD) if self.row_S is None else len(self.row_S)

    @property
    def target_GT(self) -> Tensor:
        return by_label(self.target_G)


def by_label(x: Tensor) -> Tensor:
    """Returns (G,) as (G, 1); (G, T) as it is."""
    return x if x.dim() == 2 else x[:, None]


@dataclass(frozen=True)
class Sums:
    """The result of `Kernel.sums`, over the logits that are not left out."""

    denominator_G: Tensor  # float64: sum of exp(logit)
    # Sum of exp(logit) * f'(cos) * (centre / its length), over denominator_G (0 where that is 0); None: not asked for.
    weighted_sum_GD: Tensor | None
    cache: object | None = None  # names what the kernel may remember of this pass for the next: for LogitGrad.cache
    nearest: Nearest | None = None  # as `Kernel.nearest`, with the products of this pass; None: not asked for


@dataclass(frozen=True)
class LogitGrad:
    """d(loss)/d(cosine) of all (G, S) logits, in O(G) numbers."""

    factor_G: Tensor  # float64: times exp(logit) * f'(cos) it is the gradient by the cosine of a negative
    target_grad_G: Tensor  # the gradient by the target's cosine, as Logits.target_G; used where that is >= 0
    cache: object | None = None  # Sums.cache of the same logits: saves work and changes no result


class Kernel(ABC):
    """Computes a rank's part of the softmax: products, exponentials and the centres' gradients."""

    name: str
    precision: Precision  # of the products' operands

    @abstractmethod
    def row_math(self) -> Any:
        """Returns the softmax.RowMath that is computed where this kernel computes."""

    def selector(self, sampling: Draw, shard: Shard, device: torch.device) -> Any:
        """Returns the triton_choice.DeviceChoice that chooses a step's classes without a wait for the device; None:
        this kernel has none."""
        return None

    @abstractmethod
    def sums(self, logits: Logits, with_weighted_sum: bool = True, num_nearest: int = 0) -> Sums:
        """Makes the first pass over the centres. num_nearest: how many of the nearest classes to find on the way."""

    @abstractmethod
    def nearest(self, logits: Logits, k: int) -> Nearest:
        """Finds the k active classes with the largest cosines, in float32 or float64. Uses unit_GD, centre_LD, row_S
        and sub_centres of the logits and ignores the rest; targets count. Class numbers are positions in row_S over
        sub_centres."""

    @abstractmethod
    def centre_gradients(self, logits: Logits, logit_grad: LogitGrad) -> Iterator[tuple[int, int, Tensor]]:
        """Makes the second pass: yields (begin, end, d(loss)/d(rows begin to end of row_S)), ascending and complete;
        the tensor, of unit_GD's dtype, is the caller's to overwrite, and valid until the next one is asked for."""

    def update(self, logits: Logits, logit_grad: LogitGrad, store: "RowTable", lr: float, step: int) -> bool:
        """Makes the second pass and updates the centres in it, as `store.update` would. Does nothing and returns False
        where the kernel has no fused update for this optimizer and storage."""
        return False
