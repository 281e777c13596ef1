"""Memory, traffic and time of a head, predicted before anything is allocated. report.py prints them.

Letters: C classes, L of them on one rank, S of those active in a step, W ranks, G the global batch, D width. The
formulas are for rank 0, whose shard is the largest, and for a run in which every row has been updated. Options must be
resolved (no "auto").
"""

import bisect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from partial_fc.head.kernels import cpu, plain, triton_bytes
from partial_fc.head.rows import RowAdagrad, RowAdam, RowAdamW, RowSGD, Storage

from .machine import Rates
from .options import PlanOptions

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, type] = {"sgd": RowSGD, "adamw": RowAdamW, "adagrad": RowAdagrad, "adam": RowAdam}

# ---- counts: operations of a step, with and without sampling if that matters, and bytes read plus written

# (tests/unit/head/test_step_counts.py compares them with real steps; bytes of kernels that update rows themselves:
# kernels/triton_bytes.py.)

# Beside the kernel: gathering, checks, sampling, targets, loss, backward. (On a GPU kernels do most of it. On a CPU,
# which never waits for a number, sampling is a separate step of many small operations.)
HOST_OPERATIONS = {"cuda": {False: 15, True: 17}, "cpu": {False: 57, True: 245}}
# Of a kernel with its update of rows: fixed, and per chunk.
KERNEL_OPERATIONS = {"cpu": (30, 0), "triton": (8, 5), "plain": (0, 71)}
# Of `RowTable.update`, per chunk, and per bfloat16 table besides.
_UPDATE_OPERATIONS = {"sgd": 7, "adamw": 21, "adagrad": 12, "adam": 22}
_ROUNDING_OPERATIONS = 53

# Bytes of one number of a row (in place a number counts twice): in the mathematics of each optimizer, whose operations
# are torch's own (rows/optimizers.py).
_STEP = {"sgd": 44, "adamw": 92, "adagrad": 36, "adam": 44}
# From the stored dtype to float32 and back: of contiguous rows, and of chosen ones.
_LOAD: dict[Any, dict[bool, int]] = {
    torch.float32: {False: 0, True: 8},
    torch.bfloat16: {False: 6, True: 10},
    torch.float16: {False: 6, True: 10},
}
_STORE: dict[Any, dict[bool, int]] = {
    torch.float32: {False: 0, True: 8},
    torch.bfloat16: {False: 120, True: 120},  # 116 of them for the noise and the rounding
    torch.float16: {False: 6, True: 10},
}
# In both passes of the plain kernel, after conversion of the centres to float32.
_PLAIN_PASSES = 76


def update_operations(optimizer: str, storage: Storage) -> int:
    """Returns the operations of one chunk in `RowTable.update`, if no kernel updates the rows."""
    return _UPDATE_OPERATIONS[optimizer] + _ROUNDING_OPERATIONS * _tables(optimizer, storage).count(torch.bfloat16)


def update_bytes(optimizer: str, storage: Storage, sampled: bool) -> int:
    """Returns the bytes of one number of an active row in `RowTable.update`."""
    tables = _tables(optimizer, storage)
    return _STEP[optimizer] + sum(_LOAD[dtype][sampled] + _STORE[dtype][sampled] for dtype in tables)


def _tables(optimizer: str, storage: Storage) -> list[torch.dtype]:
    """Returns the dtypes of the tables of feature width."""
    wide = list(OPTIMIZERS[optimizer]().state_widths().values()).count("row")
    return [storage.dtype, *[storage.state_dtype or storage.dtype] * wide]


# ---- memory

_CACHE_BYTES = 2 << 20  # of the level-2 cache, for which the CPU kernel's chunks are sized
_L2_BYTES = 50 << 20  # of a GPU: that of an H100


def row_bytes(workload: PlanOptions) -> dict[str, int]:
    """Returns the stored bytes of one class: its centre, its optimizer state, and the step of its last update."""
    state = sum(
        workload.dim * DTYPES[workload.state_dtype].itemsize if width == "row" else 4
        for width in OPTIMIZERS[workload.optimizer]().state_widths().values()
    )
    return {"centres": workload.dim * DTYPES[workload.dtype].itemsize, "optimizer state": state, "touched": 4 + 1}


def kept_bytes(workload: PlanOptions) -> dict[str, int]:
    """Returns the bytes that persist between steps, at --place."""
    return {name: workload.local_classes * size for name, size in row_bytes(workload).items()}


def kernel_bytes(workload: PlanOptions) -> int:
    """Returns a kernel's workspace, independent of the number of classes."""
    operand = DTYPES[workload.precision].itemsize
    if workload.impl == "triton":
        rows, kept = _chunk_rows(workload), _taken_over(workload)
        weights = kept + (rows if kept < workload.sampled else 0)
        return weights * workload.batch * operand + rows * workload.dim * 4
    if workload.impl == "cpu":
        # Packed features for all threads; each thread's gradient of the features and chunk of centres in its cache.
        common, each = 2 * workload.batch * workload.dim * operand, workload.batch * workload.dim * 4 + _CACHE_BYTES
        # Rows are updated as soon as their gradients exist, which are never stored.
        return common + workload.threads * each + _taken_over(workload) * operand * _padded_batch(workload)
    rows = _chunk_rows(workload)
    # A chunk and the remains of the previous one: eight tensors like its float32 centres, five like its logits, a mask.
    return rows * (8 * workload.dim * 4 + workload.batch * (5 * 4 + 1))


def _chunk_rows(workload: PlanOptions) -> int:
    """Returns the active rows per chunk of Triton's kernel, or the plain one."""
    if workload.impl == "plain":
        return min(workload.sampled, max(64, min(plain.CHUNK_ROWS, plain.CHUNK_LOGITS // workload.batch)))
    from partial_fc.head.kernels import triton_pass

    of_logits = workload.batch * DTYPES[workload.precision].itemsize
    most = min(triton_pass.CHUNK_BYTES // of_logits, triton_pass.CHUNK_BYTES // (workload.dim * 4))
    return min(triton_pass.CHUNK_ROWS, most, workload.sampled)


def _padded_batch(workload: PlanOptions) -> int:
    return -(-workload.batch // 16) * 16  # to whole vectors of the widest instruction set


def _taken_over(workload: PlanOptions) -> int:
    """Returns the centres whose exponentials the kernel's second pass reuses from the first."""
    if workload.impl == "triton":
        from partial_fc.head.kernels import triton

        operands = DTYPES[workload.precision]
        return triton.kept_places(workload.sampled, _chunk_rows(workload), _padded_batch(workload), operands)
    if workload.impl != "cpu":
        return 0
    room = cpu.exp_cache_bytes(workload.local_classes * workload.dim * DTYPES[workload.dtype].itemsize)
    return min(workload.sampled, room // (DTYPES[workload.precision].itemsize * _padded_batch(workload)))


def memory(workload: PlanOptions) -> dict[str, int]:
    """Returns a rank's bytes on the compute device, by component, without `elsewhere_bytes`."""
    # Negatives, their union with the batch's classes, mask and indices of the merge.
    sample = workload.sampled * (8 + 8 + 8 + 8 + 1)
    if workload.impl == "triton" and not workload.is_elsewhere:  # the union, and a byte for each class
        sample = 8 * (workload.sampled + workload.batch * workload.labels) + workload.local_classes
    return {
        **_rows_here(workload),
        # of the global batch: two copies for the kernel, unit length, gradient, two temporaries
        "features and their gradient": 7 * workload.batch * workload.dim * 4,
        "row numbers": 0 if workload.sample_rate == 1.0 else sample,
        "kernel's chunks": kernel_bytes(workload),
    }


def _rows_here(workload: PlanOptions) -> dict[str, int]:
    kept = kept_bytes(workload)
    if not workload.is_elsewhere:
        return kept
    # Copies of this step's rows, of the previous ones on their way back, of the next ones.
    return {"rows of three steps": 3 * workload.sampled * sum(row_bytes(workload).values())}


def elsewhere_bytes(workload: PlanOptions) -> int:
    """Returns the bytes of this rank's rows in host memory, in addition to `memory`."""
    return sum(kept_bytes(workload).values()) if workload.is_elsewhere else 0


def backbone_bytes(parameters: int, optimizer: str) -> dict[str, int]:
    """Returns the bytes of float32 parameters, gradient and optimizer state, without activations."""
    moments = 1 if optimizer == "sgd" else 2
    return {"backbone": 4 * parameters, "its gradient": 4 * parameters, "its optimizer state": 4 * moments * parameters}


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


def products_flop(workload: PlanOptions) -> float:
    """Returns the operations of one rank's matrix products in a step: logits in both passes (in the second those not
    kept from the first), and the gradients of features and centres, 2*G*S*D each."""
    return 2.0 * workload.batch * workload.dim * (4 * workload.sampled - _taken_over(workload))


def traffic_bytes(workload: PlanOptions) -> float:
    """Returns the bytes of one rank's rows that a step reads and writes with this kernel."""
    storage = Storage(DTYPES[workload.dtype], DTYPES[workload.state_dtype])
    fused = triton_bytes.update_bytes(OPTIMIZERS[workload.optimizer](), storage)
    sampled = workload.sample_rate < 1
    if workload.impl == "plain":
        of_number = _PLAIN_PASSES + 2 * _LOAD[storage.dtype][sampled]
        of_number += update_bytes(workload.optimizer, storage, sampled)
    elif _moves_rows(workload):
        # Read for the logits; read and written, with the state, in the gradient pass.
        of_number = storage.dtype.itemsize + fused.element
    else:
        # Read for the logits twice; the gradient is written, then read.
        of_number = 2 * storage.dtype.itemsize + 4 + update_bytes(workload.optimizer, storage, sampled)
    number_of_row = 8 if sampled else 0
    return workload.sampled * (float(of_number) * workload.dim + fused.row + number_of_row)


def _moves_rows(workload: PlanOptions) -> bool:
    """Tells whether the kernel itself updates rows as it computes their gradients: not for rows that are copies."""
    return workload.impl != "plain" and not workload.is_elsewhere


def exponentials_bytes(workload: PlanOptions) -> float:
    """Returns the traffic of exponentials: written and read if kept for the second pass, and written and read in each
    pass if those of a chunk exceed a GPU's cache."""
    kept, itemsize = _taken_over(workload), DTYPES[workload.precision].itemsize
    numbers = 2 * kept
    if workload.impl == "triton" and _chunk_rows(workload) * workload.batch * itemsize > _L2_BYTES:
        numbers = 3 * kept + 4 * (workload.sampled - kept)
    return float(numbers * itemsize * workload.batch)


def operations(workload: PlanOptions) -> float:
    """Returns the operations that a rank's host launches in a step, in sequence."""
    once = KERNEL_OPERATIONS[workload.impl][0]
    return HOST_OPERATIONS[workload.device][workload.sample_rate < 1] + once + _chunk_operations(workload)


def _chunk_operations(workload: PlanOptions) -> int:
    """Returns those that grow with the number of rows."""
    count, each_chunk = 0, KERNEL_OPERATIONS[workload.impl][1]
    if each_chunk:
        count += each_chunk * math.ceil(workload.sampled / max(1, _chunk_rows(workload)))
    if not _moves_rows(workload):
        storage = Storage(DTYPES[workload.dtype], DTYPES[workload.state_dtype])
        rows = max(1, (1 << 17 if workload.device == "cpu" else 1 << 24) // workload.dim)  # rows/table.py
        count += update_operations(workload.optimizer, storage) * math.ceil(workload.sampled / rows)
    return count


@dataclass(frozen=True)
class Machine:
    """Machine rates, from which times are predicted."""

    rates: Rates
    share: float  # fraction of the product rate that the kernel reaches
    link_gbytes_per_s: float  # of one rank, each way
    latency_s: float = 20e-6  # of one message
    host_gbytes_per_s: float = 50.0  # each way, to rows in host memory: PCIe 5


def head_seconds(workload: PlanOptions, machine: Machine) -> dict[str, float]:
    """Returns the seconds of a step, by cause. They are added, as overlap is not guaranteed. Launches of chunks overlap
    with a GPU's work on earlier chunks: they count only if they take longer."""
    # Rows are transferred each way during other computation, as far as that lasts.
    moved = workload.sampled * sum(row_bytes(workload).values()) if workload.is_elsewhere else 0
    exponentials = workload.batch * (2 * workload.sampled - _taken_over(workload))
    messages = 3 * math.ceil(math.log2(workload.gpus)) if workload.gpus > 1 else 0
    seconds = {
        "products": products_flop(workload) / (machine.share * machine.rates.gflops[workload.precision] * 1e9),
        "exponentials": exponentials / (machine.rates.gexp_per_s * 1e9),
        "exponentials through memory": exponentials_bytes(workload) / (machine.rates.gbytes_per_s * 1e9),
        "rows": traffic_bytes(workload) / (machine.rates.gbytes_per_s * 1e9),
        "rows from and to their place": moved / (machine.host_gbytes_per_s * 1e9),
        "links": sum(link_bytes(workload).values()) / (machine.link_gbytes_per_s * 1e9) + messages * machine.latency_s,
    }
    in_chunks, launch_s = _chunk_operations(workload), machine.rates.launch_us * 1e-6
    hidden = 0.0
    if workload.device == "cuda":
        work = sum(seconds[name] for name in ("products", "exponentials", "exponentials through memory", "rows"))
        hidden = min(in_chunks * launch_s, work)
    return {**seconds, "launches": operations(workload) * launch_s - hidden}
