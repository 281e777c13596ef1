"""What a head needs and takes, before anything is allocated: memory, traffic, time. plan_report.py prints it.

Letters: C classes, L of them on one rank, S of those take part in a step, W ranks, G the global batch, D width.
The formulas are of rank 0, whose shard is the largest, and of a run in which every row has been touched.
"""

import math
from dataclasses import dataclass, replace

import torch

from partial_fc.head.kernels import Impl, cpu, plain
from partial_fc.head.rows import RowAdagrad, RowAdam, RowAdamW, RowOptimizer, RowSGD
from partial_fc.head.shard import Shard
from partial_fc.machine import Rates

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS: dict[str, type] = {"sgd": RowSGD, "adamw": RowAdamW, "adagrad": RowAdagrad, "adam": RowAdam}


@dataclass(frozen=True)
class Job:
    """A head on W ranks."""

    classes: int
    dim: int
    ranks: int
    batch: int  # of all ranks
    sample_rate: float
    dtype: torch.dtype  # of the centres
    state_dtype: torch.dtype  # of the optimiser's state
    precision: str  # of the products: a key of Rates.gflops
    optimizer: RowOptimizer
    place: str  # Storage.place
    impl: Impl  # not "auto"
    device: str  # "cpu" or "cuda"
    threads: int = 1

    @property
    def local_classes(self) -> int:
        return len(Shard.of(self.classes, 0, self.ranks))

    @property
    def sampled(self) -> int:
        """S: the negatives, and the batch's classes of this rank."""
        if self.sample_rate == 1.0:
            return self.local_classes
        own = math.ceil(self.batch / self.ranks)
        return min(self.local_classes, math.ceil(self.sample_rate * self.local_classes) + own)


# ---- memory

_CACHE_BYTES = 2 << 20  # the second level's, which the CPU kernel's chunks are made for


def row_bytes(job: Job) -> dict[str, int]:
    """What one class keeps: its centre, its optimiser state, and when it was last touched."""
    state = sum(
        job.dim * job.state_dtype.itemsize if width == "row" else 4 for width in job.optimizer.state_widths().values()
    )
    return {"centres": job.dim * job.dtype.itemsize, "optimiser state": state, "touched": 4 + 1}


def kept_bytes(job: Job) -> dict[str, int]:
    """What lasts from step to step, at --place."""
    return {name: job.local_classes * size for name, size in row_bytes(job).items()}


def feature_bytes(job: Job) -> int:
    """The global batch: what came in, its two copies for the kernel, unit length, gradient, and two temporaries."""
    return 7 * job.batch * job.dim * 4


def sample_bytes(job: Job) -> int:
    """Row numbers: negatives, their union with the batch's classes, and the mask and indices that merge them."""
    return 0 if job.sample_rate == 1.0 else job.sampled * (8 + 8 + 8 + 8 + 1)


def kernel_bytes(job: Job) -> int:
    """What a kernel works in, whatever the number of classes."""
    if job.impl == "triton":
        from partial_fc.head.kernels import triton_pass

        rows = min(
            triton_pass.CHUNK_ROWS,
            triton_pass.CHUNK_BYTES // (job.batch * DTYPES[job.precision].itemsize),
            triton_pass.CHUNK_BYTES // (job.dim * 4),
        )
        rows = min(rows, job.sampled)
        return rows * (job.batch * DTYPES[job.precision].itemsize + job.dim * 4)
    if job.impl == "cpu":
        # Packed features for all threads; the features' gradient of each, and the chunk of centres in its cache.
        common = 2 * job.batch * job.dim * DTYPES[job.precision].itemsize
        each = job.batch * job.dim * 4 + _CACHE_BYTES
        # Rows move where their gradients are formed, which are never stored.
        return common + job.threads * each + _taken_over(job) * 2 * _padded_batch(job)
    rows = min(job.sampled, max(64, min(plain.CHUNK_ROWS, plain.CHUNK_LOGITS // job.batch)))
    # Of a chunk and what is left of the one before: eight like its centres in float32, five like its logits, a mask.
    return rows * (8 * job.dim * 4 + job.batch * (5 * 4 + 1))


def _padded_batch(job: Job) -> int:
    return -(-job.batch // 16) * 16  # to whole vectors of the widest instruction set


def _taken_over(job: Job) -> int:
    """Centres whose exponentials the CPU kernel's second pass takes over from the first."""
    if job.impl != "cpu" or job.precision != "bf16":
        return 0
    return min(job.sampled, cpu.EXP_CACHE_BYTES // (2 * _padded_batch(job)))


def memory(job: Job) -> dict[str, int]:
    """Bytes of one rank where it computes, by component. Without what lies elsewhere (`elsewhere_bytes`)."""
    return {
        **_rows_here(job),
        "features and their gradient": feature_bytes(job),
        "row numbers": sample_bytes(job),
        "kernel's chunks": kernel_bytes(job),
    }


def _rows_here(job: Job) -> dict[str, int]:
    kept = kept_bytes(job)
    if job.place == "device" or (job.place == "host" and job.device == "cpu"):
        return kept
    one = sum(row_bytes(job).values())
    if job.device == "cpu":
        # Files are mapped; the system takes pages back, but those of a step's rows had better stay.
        return {"rows of a step, of the files": job.sampled * one, "touched": kept["touched"]}
    # On a GPU: copies of the rows of this step, of the one before on their way back, of the next one.
    return {"rows of three steps": 3 * job.sampled * one}


def elsewhere_bytes(job: Job) -> int:
    """In the host's memory, or in files, beside `memory`: all rows of this rank."""
    if job.place == "device" or (job.place == "host" and job.device == "cpu"):
        return 0
    return sum(kept_bytes(job).values())


def backbone_bytes(parameters: int, optimizer: str) -> dict[str, int]:
    """float32 parameters, their gradient and optimiser state; activations depend on the network and are not here."""
    moments = {"sgd": 1, "adamw": 2}.get(optimizer, 2)
    return {
        "backbone": 4 * parameters,
        "its gradient": 4 * parameters,
        "its optimiser state": 4 * moments * parameters,
    }


def largest_classes(job: Job, limit_bytes: int) -> int:
    """The most classes with which `memory` stays within the limit; 0: not even one."""
    fits = lambda classes: sum(memory(replace(job, classes=classes)).values()) <= limit_bytes  # noqa: E731
    low, high = 0, 1
    while fits(high) and high < 1 << 48:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ---- collectives


def collective_bytes(job: Job, feature_itemsize: int = 4) -> dict[str, int]:
    """By name, what a rank hands in for one step (head/partial_fc.py)."""
    local_batch = math.ceil(job.batch / job.ranks)
    return {
        "head/gather": local_batch * (job.dim * feature_itemsize + 12),
        "head/softmax": 16 * job.batch,
        "head/features": 4 * job.batch * job.dim,
    }


def link_bytes(job: Job, feature_itemsize: int = 4) -> dict[str, int]:
    """By name, what a rank sends over its link in one step, and as much arrives: rings, in which an all-gather passes
    on all parts but one, a reduce-scatter all blocks but one, and an all-reduce is both."""
    others = job.ranks - 1
    handed = collective_bytes(job, feature_itemsize)
    return {
        "head/gather": others * handed["head/gather"],
        "head/softmax": 2 * others * handed["head/softmax"] // job.ranks,
        "head/features": others * handed["head/features"] // job.ranks,
    }


# ---- time


def products_flop(job: Job) -> float:
    """Of one rank's matrix products in a step: logits in both passes (in the second those that the first could not
    leave to it), the features' and the centres' gradients, 2*G*S*D each."""
    return 2.0 * job.batch * job.dim * (4 * job.sampled - _taken_over(job))


def traffic_bytes(job: Job, rows: int | None = None) -> float:
    """Of one rank's rows in a step: centres are read in both passes and written in one, state is read and written."""
    one = row_bytes(job)
    rows = job.sampled if rows is None else rows
    return rows * (3.0 * one["centres"] + 2.0 * one["optimiser state"] + 4)


def dense_update_bytes(job: Job) -> float:
    """What a dense optimiser would move instead: a float32 gradient of all local rows, zeroed, written and read, and
    every row and its state read and written."""
    one = row_bytes(job)
    return job.local_classes * (2.0 * (one["centres"] + one["optimiser state"]) + 3.0 * job.dim * 4)


@dataclass(frozen=True)
class Machine:
    """What times are computed from."""

    rates: Rates
    share: float  # of the product rate that the kernel's products reach
    link_gbytes_per_s: float  # of one rank, each way
    latency_s: float  # of one message
    place_gbytes_per_s: float = math.inf  # each way, to where rows lie elsewhere: the host, a disk


def head_seconds(job: Job, machine: Machine) -> dict[str, float]:
    """By cause; they are added up, since nothing is promised about what overlaps."""
    messages = 3 * math.ceil(math.log2(job.ranks)) if job.ranks > 1 else 0
    return {
        "products": products_flop(job) / (machine.share * machine.rates.gflops[job.precision] * 1e9),
        "exponentials": job.batch * (2 * job.sampled - _taken_over(job)) / (machine.rates.gexp_per_s * 1e9),
        "rows": traffic_bytes(job) / (machine.rates.gbytes_per_s * 1e9),
        "rows from and to their place": _rows_moved(job) / (machine.place_gbytes_per_s * 1e9),
        "links": sum(link_bytes(job).values()) / (machine.link_gbytes_per_s * 1e9) + messages * machine.latency_s,
    }


def _rows_moved(job: Job) -> float:
    """Bytes each way; they travel while something else is computed, as far as that lasts."""
    return job.sampled * sum(row_bytes(job).values()) if elsewhere_bytes(job) else 0
