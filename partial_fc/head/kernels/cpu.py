"""The C++ kernel (native/), called through ctypes. It computes the products, exponentials and update of a centre while
that is in the cache.

With precision "bf16" the operands of the products are rounded to bfloat16, and everything else is float32; with "fp32"
the operands are, too. Threads: those of torch (OMP_NUM_THREADS). On processors with AMX the products of bfloat16 are
its tiles' (native/tiles.h).
"""

import functools
import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from partial_fc.head.kernels import Kernel, LogitGrad, Logits, Precision, Sums, by_label
from partial_fc.head.kernels.cpu_rows import CpuRowMath
from partial_fc.head.kernels.nearest import Nearest
from partial_fc.head.kernels.plain import PlainKernel
from partial_fc.head.margin import Negatives
from partial_fc.head.native.build import VARIANTS
from partial_fc.head.native.library import DTYPES, call, load
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD
from partial_fc.head.rows.storage import zeros
from partial_fc.head.softmax import RowMath
from partial_fc.memory import available_memory_bytes

if TYPE_CHECKING:
    from partial_fc.head.rows.table import RowTable

# float32 ends at exp(88): the shift leaves room for the sum of 10^9 exponentials, and for logits far below it.
_HIGHEST_EXPONENT = 64.0
# Below this the exponentials that add up to a denominator have lost digits, or are 0: scales beyond 64 can have such
# rows, where every negative is far away. The plain kernel, which shifts every row by itself, does them.
_SMALLEST_DENOMINATOR = 1e-30
BF16_VARIANTS = ("avx512_bf16", "amx")  # those that multiply bfloat16 numbers; the others round, and multiply fp32
GRADIENT_BYTES = 32 << 20  # of one chunk of centre_gradients
# Of the first pass' exponentials that the second one reads: so many bytes, or a quarter of the centres' (an eighth of
# what they take with their momentum), whichever is more. What does not fit is formed again, to the same bits: a quarter
# of the products' time. Where the memory that is free is no more than a few times as much, a part of it has to do.
EXP_CACHE_BYTES = 1 << 30
EXP_CACHE_SHARE = 0.25
_SHARE_OF_FREE_MEMORY = 1 / 16  # the processes of a machine divide it


@functools.cache
def variant_here() -> str:
    """Returns the best variant that the processor runs, up to what torch uses (its ATEN_CPU_CAPABILITY=avx2 or =default
    lowers that); a RuntimeWarning says so where that is "amx" and fails its check."""
    no_more = {"AVX2": "avx2", "DEFAULT": "portable"}.get(torch.backends.cpu.get_cpu_capability())
    if no_more is not None:
        return no_more
    best = load("portable").head_best().decode()
    if best != "amx":
        return best
    try:
        problem = difference("amx", "avx512_bf16")
    except RuntimeError as error:
        problem = str(error)
    if problem is None:
        return best
    warnings.warn(
        f"the head's CPU kernel for AMX is not used on this processor: {problem}. Variant avx512_bf16, which has no "
        "tiles, is used instead. Please report this with the output of `lscpu` and `uname -r`; "
        "CpuKernel(variant='amx') takes it all the same",
        RuntimeWarning,
        stacklevel=2,
    )
    return "avx512_bf16"


def difference(variant: str, trusted: str) -> str | None:
    """Compares both passes of a variant, in bf16, with those of the trusted one, and says how they differ; None: they
    are the same but for rounding. Milliseconds: sizes that fill no tile, and more than one chunk of centres."""
    random = torch.Generator().manual_seed(0)
    num_rows, num_centres, width = 35, 213, 75
    unit_GD = torch.nn.functional.normalize(torch.randn(num_rows, width, generator=random))
    centre_SD = torch.randn(num_centres, width, generator=random)
    target_G = torch.arange(num_rows) * 5 - 1
    logits = Logits(unit_GD, centre_SD, None, target_G, 16.0, Negatives())
    target_grad_G = torch.randn(num_rows, generator=random)
    results = []
    for name in (variant, trusted):
        kernel = CpuKernel("bf16", name)
        sums = kernel.sums(logits)
        assert sums.weighted_sum_GD is not None
        logit_grad = LogitGrad(torch.full((num_rows,), 1e-3, dtype=torch.float64), target_grad_G)
        gradient_SD = torch.cat([part_KD for _, _, part_KD in kernel.centre_gradients(logits, logit_grad)])
        results.append((sums.denominator_G, sums.weighted_sum_GD, gradient_SD))
    names = ("denominators", "features' gradient", "centres' gradient")
    for what, result, expected in zip(names, *results, strict=True):
        error = ((result - expected).abs().max() / expected.abs().max()).item()
        if not error < 2**-8:  # a unit in the last place of bfloat16; also where it is NaN
            return f"its {what} differ from those of {trusted} by {error:.1e} of the largest"
    return None


class CpuKernel(Kernel):
    """The kernel in C++, float32. variant: an instruction set of native/build.py; None: the processor's best."""

    name = "cpu"

    def __init__(self, precision: Precision = "bf16", variant: str | None = None):
        if variant is not None and variant not in VARIANTS:
            raise ValueError(f"variant is {variant!r}; expected one of {', '.join(VARIANTS)}")
        self.variant = variant or variant_here()
        self.compiled = load(self.variant)
        self.precision: Precision = precision
        self.low_precision = precision == "bf16"
        self._cache = torch.empty(0)
        self._cache_wanted = 0  # numbers that `_cache` was last made for: memory may have been short
        self._cache_owner: object | None = None  # whose exponentials are in it: Sums.cache of the last pass

    def row_math(self) -> RowMath:
        return CpuRowMath(self.compiled)

    def sums(self, logits: Logits, with_weighted_sum: bool = True, num_nearest: int = 0) -> Sums:
        if not logits.negatives.is_cosine:
            return PlainKernel().sums(logits, with_weighted_sum, num_nearest)
        num_rows, width = logits.unit_GD.shape
        denominator_G = torch.zeros(num_rows, dtype=torch.float64)
        weighted_sum_GD = torch.zeros(num_rows, width, dtype=torch.float32) if with_weighted_sum else None
        job, shift = self._job(logits)
        results = {"denominator": denominator_G, "weighted_sum": weighted_sum_GD}
        nearest = Nearest(num_rows, num_nearest, torch.float32) if num_nearest else None
        found = {} if nearest is None else _nearest_fields(nearest)
        cache = self._cache_for(job) if with_weighted_sum else {}
        call(self.compiled, "head_sums", {**job, **results, **cache, **found})
        self._cache_owner = object() if cache else None
        if logits.num_sampled and bool((denominator_G < _SMALLEST_DENOMINATOR).any()):
            return PlainKernel().sums(logits, with_weighted_sum, num_nearest)
        if weighted_sum_GD is not None:
            # (By float32: with float64 it is computed by way of a copy in float64, in five times the time.)
            weighted_sum_GD.div_(denominator_G.masked_fill(denominator_G == 0, 1.0).float()[:, None])
        return Sums(denominator_G * math.exp(shift), weighted_sum_GD, self._cache_owner, nearest)

    def nearest(self, logits: Logits, k: int) -> Nearest:
        """Finds the nearest classes with float32 operands, whatever the kernel's precision is."""
        job, _ = self._job(logits)
        found = Nearest(len(logits.unit_GD), k, torch.float32)
        rules = {"low_precision": False, "filter_above": math.inf, **_nearest_fields(found)}
        call(self.compiled, "head_nearest", {**job, **rules})
        return found

    def centre_gradients(self, logits: Logits, logit_grad: LogitGrad) -> Iterator[tuple[int, int, Tensor]]:
        job, shift = self._job(logits)
        if not logits.negatives.is_cosine or not _representable(logit_grad, shift):
            yield from PlainKernel().centre_gradients(logits, logit_grad)
            return
        width = logits.unit_GD.shape[1]
        step = max(1, GRADIENT_BYTES // (4 * width) // logits.sub_centres) * logits.sub_centres
        for begin in range(0, logits.num_sampled, step):
            end = min(begin + step, logits.num_sampled)
            grad_KD = torch.empty(end - begin, width, dtype=torch.float32)
            results = {"begin": begin, "end": end, "grad": grad_KD}
            call(self.compiled, "head_gradients", {**job, **_logit_grad_fields(logit_grad, shift), **results})
            yield begin, end, grad_KD

    def update(self, logits: Logits, logit_grad: LogitGrad, store: "RowTable", lr: float, step: int) -> bool:
        """Updates centres and state that the processor can address."""
        if logits.centre_LD.data_ptr() != store.centre_LD.data_ptr() or not logits.negatives.is_cosine:
            return False
        job, shift = self._job(logits)
        if not _representable(logit_grad, shift):
            return False
        more = _logit_grad_fields(logit_grad, shift)
        if logit_grad.cache is not None and logit_grad.cache is self._cache_owner:  # no other pass has come since
            more |= self._cache_for(job)
        moved = _optimizer_fields(store, logits.num_sampled, lr, step)
        call(self.compiled, "head_update", {**job, **more, **moved})
        return True

    def _cache_for(self, job: dict[str, Any]) -> dict[str, Any]:
        """Memory for the first pass' exponentials, from which the second one reads them; {}: none."""
        padded = self.compiled.head_cache_row(job["G"], self.low_precision)
        dtype = torch.bfloat16 if self.low_precision else torch.float32
        most = exp_cache_bytes(job["centre"].nbytes) // (padded * dtype.itemsize)
        if min(job["S"], most) * padded > self._cache_wanted:
            # (With room for the next steps: how many rows take part differs a little.)
            self._cache_wanted, self._cache = min(job["S"] * 9 // 8, most) * padded, torch.empty(0)
            free = int(_SHARE_OF_FREE_MEMORY * available_memory_bytes()) // dtype.itemsize
            self._cache = zeros(1, min(self._cache_wanted, free), dtype, torch.device("cpu"))
        rows = min(job["S"], most, self._cache.numel() // padded)
        return {"cache": self._cache, "cached_rows": rows} if rows else {}

    def _job(self, logits: Logits) -> tuple[dict[str, Any], float]:
        """The arguments that all calls have in common, and the shift of the exponents."""
        negatives = logits.negatives
        shift = max(0.0, logits.scale - _HIGHEST_EXPONENT)
        job = {
            "G": len(logits.unit_GD),
            "D": logits.unit_GD.shape[1],
            "S": logits.num_sampled,
            "T": logits.target_GT.shape[1],
            "unit": logits.unit_GD.contiguous(),
            "centre": logits.centre_LD,
            "row": logits.row_S,
            "target": logits.target_GT,
            "scale": logits.scale,
            "shift": shift,
            "filter_above": math.inf if negatives.filter_above is None else negatives.filter_above,
            "sub_centres": logits.sub_centres,
            "centre_dtype": DTYPES[logits.centre_LD.dtype],
            "low_precision": self.low_precision,
            "threads": torch.get_num_threads(),
        }
        _check_indices(logits)
        return job, shift


def exp_cache_bytes(centre_bytes: int) -> int:
    """Returns how many bytes of the first pass' exponentials may be kept, given the bytes of the centres."""
    return max(EXP_CACHE_BYTES, int(EXP_CACHE_SHARE * centre_bytes))


def _check_indices(logits: Logits) -> None:
    """Raises ValueError for centres that are not there."""
    centre_LD, row_S, width = logits.centre_LD, logits.row_S, logits.unit_GD.shape[1]
    if centre_LD.shape[1:] != (width,) or not centre_LD.is_contiguous():
        raise ValueError(f"the C++ kernel's centres have shape {tuple(centre_LD.shape)}; expected (rows, {width})")
    if row_S is not None and len(row_S) and not 0 <= int(row_S[0]) <= int(row_S[-1]) < len(centre_LD):
        raise ValueError(f"rows {int(row_S[0])} to {int(row_S[-1])} of a table of {len(centre_LD)} centres")
    if len(logits.target_G) and int(logits.target_G.max()) >= logits.num_sampled:
        raise ValueError(f"target {int(logits.target_G.max())} of {logits.num_sampled} active rows")


def _nearest_fields(nearest: Nearest) -> dict[str, Any]:
    """Where the nearest classes are written to."""
    k = nearest.cosine_GK.shape[1]
    return {"num_nearest": k, "nearest_cos": nearest.cosine_GK, "nearest_class": nearest.class_GK}


def _optimizer_fields(store: "RowTable", num_rows: int, lr: float, step: int) -> dict[str, Any]:
    """The optimizer, and the state that it reads and writes (native/optimizers.h)."""
    optimizer, keys, tables = store.optimizer, store.begin_fused_update(num_rows, lr, step), store.row_state()
    widths = optimizer.state_widths()
    wide = [name for name, width in widths.items() if width == "row"]
    scalar = [name for name, width in widths.items() if width == "scalar"]
    dtype = tables[wide[0]].dtype if wide else torch.float32
    match optimizer:
        case RowSGD():
            settings = {"optimizer": 0, "nesterov": optimizer.nesterov, "beta1": optimizer.momentum}
        case RowAdamW():
            settings = {"optimizer": 1, "beta1": optimizer.beta1, "beta2": optimizer.beta2, "eps": optimizer.eps}
        case RowAdagrad():
            settings = {"optimizer": 2, "eps": optimizer.eps}
        case _:
            raise TypeError(f"native/optimizers.h does not have {optimizer}")
    return {
        **settings,
        "lr": lr,
        "weight_decay": optimizer.weight_decay,
        "wide": tuple(tables[name].data_ptr() for name in wide),
        "wide_dtype": DTYPES[dtype],
        "wide_key": tuple(keys[name] for name in wide),
        "scalar": tuple(tables[name].data_ptr() for name in scalar),
        "centre_key": keys["centres"],
        "touched": tables["touched"],
        "touched_step": step + 1,
        "first_row": store.first_row,
    }


def _representable(logit_grad: LogitGrad, shift: float) -> bool:
    """Says whether no row's denominator is so small that its exponentials are lost in float32."""
    largest = logit_grad.factor_G.abs().max().item() * math.exp(shift)
    return not largest > 1 / _SMALLEST_DENOMINATOR  # also where it is NaN, which is to come through


def _logit_grad_fields(logit_grad: LogitGrad, shift: float) -> dict[str, Tensor]:
    factor_G = (logit_grad.factor_G * math.exp(shift)).float()
    target_grad_GT = by_label(logit_grad.target_grad_G).float().contiguous()
    return {"factor": factor_G, "target_grad": target_grad_GT}
