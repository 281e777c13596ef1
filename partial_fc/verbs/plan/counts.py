"""Memory, traffic and time of a head, predicted before anything is allocated. report.py prints them.

Letters: C classes, L of them on one rank, S of those active in a step, W ranks, G the global batch, D width. The
formulas are for rank 0, whose shard is the largest, and for a run in which every row has been updated. Options must be
resolved (no "auto").
"""

import bisect
import math
import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partial_fc.head.kernels import cpu, triton_bytes
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD, Storage
from partial_fc.machine import has_bf16

from .options import PlanOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, type] = {"sgd": RowSGD, "adamw": RowAdamW, "adagrad": RowAdagrad}

# ---- memory

_CACHE_BYTES = 2 << 20  # of the level-2 cache, for which the CPU kernel's chunks are sized
_L2_BYTES = 50 << 20  # of a GPU: that of an H100


def kept_bytes(workload: PlanOptions) -> dict[str, int]:
    """Returns the bytes of the classes that persist between steps. touched: the step of a row's last update, and
    whether it exists."""
    state = sum(
        workload.dim * DTYPES[workload.state_dtype].itemsize if width == "row" else 4
        for width in OPTIMIZERS[workload.optimizer]().state_widths().values()
    )
    each = {"centres": workload.dim * DTYPES[workload.dtype].itemsize, "optimizer state": state, "touched": 4 + 1}
    return {name: workload.local_classes * size for name, size in each.items()}


def kernel_bytes(workload: PlanOptions) -> int:
    """Returns a kernel's workspace, independent of the number of classes."""
    operand = DTYPES[workload.precision].itemsize
    if workload.device == "cuda":
        rows, kept = _chunk_rows(workload), _taken_over(workload)
        weights = kept + (rows if kept < workload.sampled else 0)
        return weights * workload.batch * operand + rows * workload.dim * 4
    # Packed features for all threads; each thread's gradient of the features and chunk of centres in its cache.
    common, each = 2 * workload.batch * workload.dim * operand, workload.batch * workload.dim * 4 + _CACHE_BYTES
    # Rows are updated as soon as their gradients exist, which are never stored.
    return common + workload.threads * each + _taken_over(workload) * operand * _padded_batch(workload)


def _chunk_rows(workload: PlanOptions) -> int:
    """Returns the active rows per chunk of Triton's kernel."""
    from partial_fc.head.kernels import triton_pass

    of_logits = workload.batch * DTYPES[workload.precision].itemsize
    most = min(triton_pass.CHUNK_BYTES // of_logits, triton_pass.CHUNK_BYTES // (workload.dim * 4))
    return min(triton_pass.CHUNK_ROWS, most, workload.sampled)


def _padded_batch(workload: PlanOptions) -> int:
    return -(-workload.batch // 16) * 16  # to whole vectors of the widest instruction set


def _taken_over(workload: PlanOptions) -> int:
    """Returns the centres whose exponentials the kernel's second pass reuses from the first."""
    if workload.device == "cuda":
        from partial_fc.head.kernels import triton

        operands = DTYPES[workload.precision]
        return triton.kept_places(workload.sampled, _chunk_rows(workload), _padded_batch(workload), operands)
    room = cpu.exp_cache_bytes(workload.local_classes * workload.dim * DTYPES[workload.dtype].itemsize)
    return min(workload.sampled, room // (DTYPES[workload.precision].itemsize * _padded_batch(workload)))


def memory(workload: PlanOptions) -> dict[str, int]:
    """Returns a rank's bytes by component."""
    # Negatives, their union with the batch's classes, mask and indices of the merge.
    sample = workload.sampled * (8 + 8 + 8 + 8 + 1)
    if workload.device == "cuda":  # the union, and a byte for each class
        sample = 8 * (workload.sampled + workload.batch * workload.labels) + workload.local_classes
    return {
        **kept_bytes(workload),
        # of the global batch: two copies for the kernel, unit length, gradient, two temporaries
        "features and their gradient": 7 * workload.batch * workload.dim * 4,
        "row numbers": 0 if workload.sample_rate == 1.0 else sample,
        "kernel's chunks": kernel_bytes(workload),
    }


def largest_classes(workload: PlanOptions, limit_bytes: int) -> int:
    """Returns the largest number of classes with which `memory` is within the limit; 0: none."""
    together = lambda classes: sum(memory(replace(workload, classes=classes)).values())  # noqa: E731
    return bisect.bisect_right(range(1, 1 << 48), limit_bytes, key=together)


# ---- collectives


def collective_bytes(workload: PlanOptions, feature_itemsize: int = 4) -> dict[str, int]:
    """Returns the bytes that a rank gives to each collective in a step (head/partial_fc.py)."""
    local_batch, labels = math.ceil(workload.batch / workload.gpus), workload.labels
    beside = 12 if labels == 1 else 16 * labels + 4
    return {
        "head/gather": local_batch * (workload.dim * feature_itemsize + beside),
        "head/softmax": 8 * (1 + labels) * workload.batch,
        "head/features": 4 * workload.batch * workload.dim,
    }


def link_bytes(workload: PlanOptions) -> dict[str, int]:
    """Returns the bytes that a rank sends over its link in a step, by collective; as many arrive. Rings: an all-gather
    forwards all parts but one, a reduce-scatter all blocks but one, and an all-reduce is both."""
    others = workload.gpus - 1
    handed = collective_bytes(workload)
    return {
        "head/gather": others * handed["head/gather"],
        "head/softmax": 2 * others * handed["head/softmax"] // workload.gpus,
        "head/features": others * handed["head/features"] // workload.gpus,
    }


# ---- time

# The fraction of the product rate that the kernel reaches, beside exponentials and row reads. cpu: measured on the
# machine of docs/benchmarks.md at D = 512, batch 128; triton: assumed.
KERNEL_SHARE = {"cpu": 0.85, "cuda": 0.6}
# Of the small operations of a step, for any number of rows: about 25 on a GPU, up to 275 on a CPU.
_LAUNCHES_S = {"cuda": 0.125e-3, "cpu": 0.4e-3}
_MESSAGE_S = 20e-6  # latency


def traffic_bytes(workload: PlanOptions) -> float:
    """Returns the bytes of one rank's rows that a step reads and writes."""
    storage = Storage(DTYPES[workload.dtype], DTYPES[workload.state_dtype])
    fused = triton_bytes.update_bytes(OPTIMIZERS[workload.optimizer](), storage)
    # Read for the logits; read and written, with the state, in the gradient pass.
    of_number = storage.dtype.itemsize + fused.element
    number_of_row = 8 if workload.sample_rate < 1 else 0
    return workload.sampled * (float(of_number) * workload.dim + fused.row + number_of_row)


def exponentials_bytes(workload: PlanOptions) -> float:
    """Returns the traffic of exponentials: written and read if kept for the second pass, and written and read in each
    pass if those of a chunk exceed a GPU's cache."""
    kept, itemsize = _taken_over(workload), DTYPES[workload.precision].itemsize
    numbers = 2 * kept
    if workload.device == "cuda" and _chunk_rows(workload) * workload.batch * itemsize > _L2_BYTES:
        numbers = 3 * kept + 4 * (workload.sampled - kept)
    return float(numbers * itemsize * workload.batch)


def head_seconds(workload: PlanOptions, rates: "Rates") -> dict[str, float]:
    """Returns the seconds of a step, by cause. They are added, as overlap is not guaranteed."""
    kept = _taken_over(workload)
    # Logits in both passes (in the second those not kept from the first), and the gradients of features and centres.
    products_flop = 2.0 * workload.batch * workload.dim * (4 * workload.sampled - kept)
    exponentials = workload.batch * (2 * workload.sampled - kept)
    messages = 3 * math.ceil(math.log2(workload.gpus)) if workload.gpus > 1 else 0
    return {
        "products": products_flop / (KERNEL_SHARE[workload.device] * rates.gflops[workload.precision] * 1e9),
        "exponentials": exponentials / (rates.gexp_per_s * 1e9),
        "exponentials through memory": exponentials_bytes(workload) / (rates.gbytes_per_s * 1e9),
        "rows": traffic_bytes(workload) / (rates.gbytes_per_s * 1e9),
        "links": sum(link_bytes(workload).values()) / (workload.link_gbps / 8 * 1e9) + messages * _MESSAGE_S,
        "launches": _LAUNCHES_S[workload.device],
    }


# ---- rates


@dataclass(frozen=True)
class Rates:
    """The rates of one process with its threads, or of one GPU."""

    gflops: dict[str, float]  # of matrix products, by dtype: "fp32", "bf16"
    gbytes_per_s: float  # of memory: what is read plus what is written
    gexp_per_s: float  # of numbers in the cache


def measure_rates(device: torch.device, batch: int, dim: int) -> Rates:
    """Measures rates, the best of a few tries, as the machine is shared. Products: the head's, (batch, dim) with (dim,
    8192), and square ones, whichever is faster. Without bf16 the head's kernel rounds to bf16 and multiplies in
    fp32."""
    side = 8192 if device.type == "cuda" else 1024
    shapes = ((batch, dim, 8192), (side, side, side))
    gflops = {"fp32": max(_product_gflops(shape, torch.float32, device) for shape in shapes)}
    gflops["bf16"] = gflops["fp32"]
    if has_bf16(device):
        gflops["bf16"] = max(_product_gflops(shape, torch.bfloat16, device) for shape in shapes)
    x = torch.zeros(1 << 16 if device.type == "cpu" else 1 << 28, device=device)
    y = torch.empty_like(x)
    gexp_per_s = len(x) / 1e9 / _best_seconds(lambda: torch.exp(x, out=y), device)
    # A copy between two blocks larger than any cache: bytes read plus written.
    num_bytes = (4096 if device.type == "cuda" else 128) << 20
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    gbytes_per_s = 2 * num_bytes / 1e9 / _best_seconds(lambda: target.copy_(source), device)
    return Rates(gflops, gbytes_per_s, gexp_per_s)


def _product_gflops(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> float:
    m, k, n = shape
    a, b = (torch.randn(size, device=device).to(dtype) for size in ((m, k), (k, n)))
    out = torch.empty(m, n, dtype=dtype, device=device)
    return 2 * m * k * n / 1e9 / _best_seconds(lambda: torch.mm(a, b, out=out), device)


def _best_seconds(work: Callable[[], Tensor], device: torch.device, tries: int = 8) -> float:
    def work_and_wait() -> None:
        work()
        synchronise(device)

    synchronise(device)
    return min(timeit.repeat(work_and_wait, number=1, repeat=tries))


def synchronise(device: torch.device) -> None:
    """Waits for the GPU, if it is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
