"""One process of `python -m benchmarks.head`: trains one side's head on random features and measures it."""

import itertools
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from partial_fc import comm
from partial_fc.comm import World
from partial_fc.comm.launch import spawn
from partial_fc.comm.world import Traffic
from partial_fc.head import Compute, CosFace, PartialFC, Sampling, Shard, Storage
from partial_fc.head.kernels import AutoPrecision, Precision
from partial_fc.head.kernels.choice import choose
from partial_fc.head.kernels.cpu import CpuKernel
from partial_fc.verbs.plan.counts import DTYPES, OPTIMIZERS, Rates, measure_rates, synchronise

from .baselines import Baseline, LocalHead, PlainHead, TorchHead
from .head import LABEL_BY_LABEL, LINE, OURS, REFUSAL, HeadOptions
from .insightface_style import InsightFaceStyleHead
from .peak_memory import PeakMemory

Head = PartialFC | Baseline
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Side:
    """A measured side: its name, and the dtypes of its operands and of its storage."""

    name: str
    precision: Precision
    dtype: str
    state_dtype: str

    @classmethod
    def of(cls, options: HeadOptions, name: str, precision: AutoPrecision, device: torch.device) -> "Side":
        """Resolves "auto" and "same"."""
        if name in (OURS, LABEL_BY_LABEL):
            operands = choose(options.impl, device, torch.float32, precision).precision
            dtype = operands if options.dtype == "auto" else options.dtype
            return cls(name, operands, dtype, dtype if options.state_dtype == "same" else options.state_dtype)
        assert precision != "auto"
        return cls(name, precision, options.versus_dtype, options.versus_dtype)  # as stored by torch.optim.SGD


def _worker(options: HeadOptions, side: Side, world: World, device: torch.device, folder: Path) -> None:
    """Measures a side; rank 0 writes the line. folder: temporary."""
    by_label = side.name == LABEL_BY_LABEL
    # Libraries loaded by a first step (torch.optim alone brings 200 MB) count as idle memory.
    tiny = replace(options, classes=64 * world.size, batch=8 * world.size, dim=16, steps=1)
    head = _head(tiny, side, world, device)
    _time_steps(head, tiny, world, device, by_label)
    if isinstance(head, PartialFC):
        head.close()
    memory = PeakMemory(device)
    head = _head(options, side, world, device)
    if isinstance(head, PartialFC) and not options.fresh:
        _create_all_rows(head)
    steps = _time_steps(head, options, world, device, by_label)
    slowest_N = world.all_reduce(steps.seconds_N4.sum(dim=1), "max", name="bench/seconds")
    kept = _kept_bytes(head)
    sizes = torch.tensor([memory.added_bytes(), kept, memory.mapped_file_bytes()])
    added, kept, mapped = world.all_reduce(sizes, "max", name="bench/memory").tolist()
    # Only now: its matrices must neither count as the head's memory nor hide any of it.
    rates = measure_rates(device, options.batch, options.dim)
    if world.rank == 0:
        step_s = slowest_N.quantile(0.5).item()  # torch.median takes the lower of two
        parts = zip(_PARTS, steps.seconds_N4.quantile(0.5, dim=0).tolist(), strict=True)
        line = {
            **_computed_in(head, side),
            "instructions": torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else "-",
            "rows": steps.num_rows,
            "step_s": round(step_s, 6),
            **{name: round(seconds, 4) for name, seconds in parts},
            "added_bytes": added,
            "kept_bytes": kept,
            "peak_bytes": added - kept,
            "mapped_file_bytes": mapped,
            "collectives": sum(steps.traffic.calls.values()),
            "bytes": sum(steps.traffic.num_bytes.values()),
            "bytes_by_name": dict(steps.traffic.num_bytes),
            **_bound(head, side, options, steps.num_rows, step_s, rates),
            "torch": torch.__version__,
        }
        (folder / LINE).write_text(json.dumps(line, default=str))
    if isinstance(head, PartialFC):
        head.close()


def _computed_in(head: Head, side: Side) -> dict[str, Any]:
    """Returns the kernel, and the dtypes that a comparison of times needs."""
    storage = {"dtype": side.dtype, "state_dtype": side.state_dtype}
    if not isinstance(head, PartialFC):
        dtypes = {"logit_dtype": NAMES[head.logit_dtype], "sum_dtype": NAMES[head.sum_dtype]}
        return {"side": side.name, "impl": "torch", "precision": head.precision, **dtypes, **storage}
    kernel = head.kernel
    impl = f"{kernel.name} ({kernel.variant})" if isinstance(kernel, CpuKernel) else kernel.name
    dtypes = {"logit_dtype": "fp32", "sum_dtype": "fp32"}
    return {"side": side.name, "impl": impl, "precision": kernel.precision, **dtypes, **storage}


def _bound(head: Head, side: Side, options: HeadOptions, rows: int, step_s: float, rates: Rates) -> dict[str, Any]:
    """Computes lower bounds of a step's time: the products at torch.mm's rate, and the minimum traffic at a copy's
    rate: active centres read for the logits; centre and state read and written in the update."""
    precision = head.kernel.precision if isinstance(head, PartialFC) else head.precision
    gflop = 6 * options.batch * options.dim * rows / 1e9
    kept = _kept_bytes(head) / max(1, len(head.shard) if isinstance(head, PartialFC) else head.num_local)
    row_bytes = options.dim * DTYPES[side.dtype].itemsize + 2 * kept
    products_s, bytes_s = gflop / rates.gflops[precision], rows * row_bytes / 1e9 / rates.gbytes_per_s
    return {
        "gflops": round(gflop / step_s, 1),
        "products_s": round(products_s, 5),
        "bytes_s": round(bytes_s, 5),
        "share_of_matmul": round(products_s / step_s, 3),
        "share_of_bound": round(max(products_s, bytes_s) / step_s, 3),
        "matmul_gflops": {name: round(rate, 1) for name, rate in rates.gflops.items()},
        "memory_gbytes_per_s": round(rates.gbytes_per_s, 1),
    }


def _head(options: HeadOptions, side: Side, world: World, device: torch.device) -> Head:
    if side.name not in (OURS, LABEL_BY_LABEL):
        dtypes: dict[str, Any] = {"precision": side.precision, "dtype": DTYPES[side.dtype]}
        if side.name == "insightface-style":
            return InsightFaceStyleHead(
                options.classes, options.dim, CosFace(), options.sample_rate, world, device, **dtypes
            )
        kind = {"plain": PlainHead, "torch": TorchHead}[side.name]
        num_local = len(Shard.of(options.classes, world.rank, world.size))
        return kind(num_local, options.dim, CosFace(), options.sample_rate, device, **dtypes)
    storage = Storage(DTYPES[side.dtype], DTYPES[side.state_dtype], options.place)
    return PartialFC(
        options.classes,
        options.dim,
        CosFace(),
        world=world,
        optimizer=OPTIMIZERS[options.optimizer](),
        device=Compute(device, options.impl, side.precision),
        # Rows rest, as on the plain sides, which move the rows of the step alone.
        sampling=Sampling(options.sample_rate, catch_up="none"),
        storage=storage,
    )


def _create_all_rows(head: PartialFC) -> None:
    """Creates all centres and their state memory: zeros are allocated only when written."""
    head.store.all_rows()
    for rows in head.row_state().values():
        for part in rows.split(4096):
            part.add_(0)


def _kept_bytes(head: Head) -> int:
    """Returns the bytes of this process's centres and optimizer state."""
    if not isinstance(head, PartialFC):
        return 2 * head.weight_LD.numel() * head.weight_LD.element_size()
    return sum(rows.numel() * rows.element_size() for rows in head.row_state().values())


_PARTS = ("forward_s", "backward_s", "update_s", "communication_s")


@dataclass(frozen=True)
class Steps:
    seconds_N4: Tensor  # of _PARTS for each timed step; their sum is the step
    traffic: Traffic  # of the last step
    num_rows: int  # of this process, active in a step; the mean


def _time_steps(head: Head, options: HeadOptions, world: World, device: torch.device, by_label: bool = False) -> Steps:
    """Times the steps. Waiting for other ranks counts as communication, not as forward, backward or update."""
    rows = options.batch // options.num_processes
    # A head without communication has the whole batch. It contains as many of its classes as of a rank's: each label
    # has several features. With independent labels it would train more rows than a rank of a sharded head.
    repeats = options.num_processes if isinstance(head, LocalHead) else 1
    num_classes = head.num_local if isinstance(head, LocalHead) else options.classes
    generator = torch.Generator().manual_seed(world.rank)
    seconds: list[list[float]] = []
    num_rows: list[int] = []
    for _ in range(options.steps + 1):
        feat_BD = torch.randn(rows * repeats, options.dim, generator=generator).to(device).requires_grad_()
        size = (rows, options.labels) if options.labels > 1 else (rows,)
        label_B = torch.randint(0, num_classes, size, generator=generator).to(device)
        label_B = torch.cat([label_B] * repeats)
        world.barrier()
        with world.count_traffic() as traffic:
            laps = [_now(world, device)]
            loss = _label_by_label(head, feat_BD, label_B) if by_label else head(feat_BD, label_B)
            laps.append(_now(world, device))
            loss.backward()
            laps.append(_now(world, device))
            num_rows.append(head.pending[-1].logits.num_sampled if isinstance(head, PartialFC) else head.num_rows)
            head.step(0.1)
            laps.append(_now(world, device))
        busy = [(end - begin) - (waited - before) for (begin, before), (end, waited) in itertools.pairwise(laps)]
        seconds.append([*busy, laps[-1][1] - laps[0][1]])
    return Steps(torch.tensor(seconds[1:], dtype=torch.float64), traffic, round(mean(num_rows[1:])))


def _label_by_label(head: Head, feat_BD: Tensor, label_BK: Tensor) -> Tensor:
    assert isinstance(head, PartialFC)
    head.prepare(label_BK)
    return torch.stack([head(feat_BD, label_B) for label_B in label_BK.unbind(dim=1)]).mean()


def _now(world: World, device: torch.device) -> tuple[float, float]:
    synchronise(device)
    return time.perf_counter(), world.seconds_waiting


def _main(job: dict[str, Any]) -> None:
    spawn.stay_with_parent()
    name, precision, folder = job.pop("side"), job.pop("side_precision"), Path(job.pop("folder"))
    options = HeadOptions(**job)
    world = comm.init(options.device)
    try:
        device = torch.device("cuda", world.local_rank) if options.device == "cuda" else torch.device("cpu")
        _worker(options, Side.of(options, name, precision, device), world, device, folder)
    except ValueError as error:
        (folder / REFUSAL.format(world.rank)).write_text(str(error))
        sys.exit(1)
    world.close()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
