"""The local part of the softmax, behind one front door: `choose(impl, ...)`.

Every kernel answers the same two questions about this rank's (G, S) logits, which are described and never formed:
`sums`, for the loss and the features' gradient, and `centre_gradients`, chunk by chunk. plain.py is the definition,
in PyTorch; the others are tested against it, and all of them against reference.py.
"""

import importlib.util
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from partial_fc.head.margin import Negatives

if TYPE_CHECKING:
    from partial_fc.head.centres import Centres

Impl = Literal["auto", "plain", "cpu", "triton"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Logits:
    """scale * f(cos(feature g, centre c)) + bias_S[c], where f is the margin's `Negatives`.

    A row's own class is left out everywhere (its logit has the margin and is one number a row: partial_fc.py adds
    it), and so is what `negatives` filters. Rows and centres of length 0 have cosine 0 with everything.
    """

    unit_GD: Tensor  # features of length 1 (or 0): float32 or float64, the dtype that is computed in
    centre_LD: Tensor  # this rank's centres as they are stored, of any length
    row_S: Tensor | None  # int64, ascending: the rows that take part; None: all
    own_G: Tensor  # int64: the place in row_S of the own centre; -1 where another rank has it
    scale: float
    negatives: Negatives
    bias_S: Tensor | None = None  # float32: -log(probability that the class was sampled)
    # Places k * sub_centres ... + sub_centres - 1 of row_S are one class; its logit is that of the nearest of them.
    sub_centres: int = 1

    @property
    def num_sampled(self) -> int:
        return len(self.centre_LD) if self.row_S is None else len(self.row_S)


@dataclass(frozen=True)
class Sums:
    """What `sums` finds, over the logits that are not left out."""

    denominator_G: Tensor  # float64: sum of exp(logit)
    # Sum of exp(logit) * f'(cos) * (centre / its length), over denominator_G (0 where that is 0); None: not asked for.
    pull_GD: Tensor | None
    total_D: Tensor | None  # sum of all unit centres that take part, own ones too; None: not asked for
    kept: object | None = None  # what the kernel may remember of this pass for the next; goes into Slopes.kept


@dataclass(frozen=True)
class Slopes:
    """d(loss)/d(cosine) for every logit, in O(G) numbers."""

    factor_G: Tensor  # float64: times exp(logit) * f'(cos) it is the slope of a negative
    own_G: Tensor  # the slope of the row's own cosine; used where Logits.own_G >= 0
    all_D: Tensor | None = None  # is added to the gradient of every unit centre (label smoothing)
    kept: object | None = None  # Sums.kept of the same logits: saves work and changes no result


class Kernel(ABC):
    name: str

    @abstractmethod
    def sums(self, logits: Logits, want_pull: bool = True, want_total: bool = False) -> Sums:
        """One pass over the centres."""

    @abstractmethod
    def centre_gradients(self, logits: Logits, slopes: Slopes) -> Iterator[tuple[int, int, Tensor]]:
        """(begin, end, d(loss)/d(rows begin to end of row_S)), ascending and complete; the tensor, of unit_GD's
        dtype, is the taker's to overwrite, and valid until the next one is asked for."""

    def update(self, logits: Logits, slopes: Slopes, store: "Centres", lr: float, step: int) -> bool:
        """Forms the gradients and moves the centres in the same pass, with what `store.update` would have done. Where
        a kernel cannot do that for this optimiser and storage it does nothing and says False."""
        return False


def choose(impl: Impl, device: torch.device, dtype: torch.dtype, precision: Precision) -> Kernel:
    """The kernel that `impl` names; "auto": the fastest for this device and dtype. On a CPU without a compiler that is
    the plain one, and a RuntimeWarning says so."""
    if impl == "auto":
        if dtype == torch.float64:
            impl = "plain"
        elif device.type == "cuda":
            impl = "triton"
        else:
            impl = _auto_on_cpu()
    if impl == "plain":
        from partial_fc.head.kernels.plain import PlainKernel

        return PlainKernel()
    if dtype != torch.float32:
        raise ValueError(f"impl {impl!r} computes in float32; for {dtype} use impl 'plain'")
    if impl == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ValueError(
                "impl 'triton' needs the package triton, which is not installed here: `pip install triton` (CUDA "
                "builds of torch bring it along), or use impl 'plain', or 'cpu' with centres on the CPU"
            )
        from partial_fc.head.kernels.triton import TritonKernel, runs_on

        if not runs_on(device):
            raise ValueError(f"impl 'triton' with centres on {device}: it needs a CUDA device; use 'cpu' or 'plain'")
        return TritonKernel(precision)
    if impl == "cpu":
        if device.type != "cpu":
            raise ValueError(f"impl 'cpu' with centres on {device}; use 'triton' or 'plain' there")
        from partial_fc.head.kernels.cpu import CpuKernel

        return CpuKernel(precision)
    raise ValueError(f"impl is {impl!r}; expected one of {', '.join(get_args(Impl))}")


def _auto_on_cpu() -> Impl:
    from partial_fc.head.kernels.cpu import load
    from partial_fc.head.kernels.native.build import CompilerNotFoundError

    try:
        load()
    except CompilerNotFoundError as error:
        warnings.warn(f"{error}. impl 'auto' takes 'plain' on this machine", RuntimeWarning, stacklevel=3)
        return "plain"
    return "cpu"
