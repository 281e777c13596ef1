"""`partial-fc bench head`: time and memory of the head alone, on its own or against the textbook one.

Each measurement runs in fresh processes under torchrun; with --versus plain both sides run in turn, several times, and
the medians of the pairs' ratios are reported, since a machine's speed drifts.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from partial_fc import comm
from partial_fc.bench.options import HeadOptions
from partial_fc.bench.plan import DTYPES, OPTIMIZERS
from partial_fc.bench.textbook_head import TextbookHead
from partial_fc.comm import World
from partial_fc.comm.world import Traffic
from partial_fc.head import CosFace, PartialFC, Storage
from partial_fc.machine import PeakMemory, measure_rates, synchronise


def bench_head(options: HeadOptions) -> None:
    """Prints what was measured; ValueError where a run fails."""
    print(json.dumps(measure(options)))


def measure(options: HeadOptions) -> dict[str, Any]:
    """The line of `partial-fc bench head`: the median run's, with --versus also the ratios."""
    if options.batch % options.num_processes:
        raise ValueError(f"--batch {options.batch} is not divisible by --np {options.num_processes}")
    if options.versus == "none":
        return _run(options, "ours")
    if options.optimizer != "sgd":
        raise ValueError(f"--versus plain with --optimizer {options.optimizer}: the textbook head has SGD only")
    runs = [{side: _run(options, side) for side in ("ours", "textbook")} for _ in range(options.rounds)]
    line = sorted((run["ours"] for run in runs), key=lambda r: r["step_s"])[len(runs) // 2]
    for ratio, measured in (("speedup", "step_s"), ("memory_ratio", "added_bytes")):
        line[ratio] = round(median(r["textbook"][measured] / r["ours"][measured] for r in runs), 2)
        line[f"textbook_{measured}"] = median(r["textbook"][measured] for r in runs)
    return line


def _run(options: HeadOptions, side: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="partial-fc-bench-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={options.num_processes}", "-m", "partial_fc.bench.head"]
        done = subprocess.run(
            [*command, json.dumps({**asdict(options), "side": side, "folder": folder}, default=str)],
            env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        # The cause is the first error of a rank; the others, and torchrun, complain of what follows from it.
        errors = re.findall(r"^\[rank\d+\]: \w[\w.]*Error.*$", done.stderr, re.MULTILINE)
        raise ValueError(f"the {side} side failed:\n" + ("\n".join(errors) or done.stderr[-3000:]))
    return json.loads(done.stdout.strip().splitlines()[-1])


def _worker(options: HeadOptions, side: str, scratch: Path) -> None:
    """One process of a run; rank 0 prints the line. scratch: a folder that is removed afterwards."""
    world = comm.init(options.device)
    device = torch.device("cuda", world.local_rank) if options.device == "cuda" else torch.device("cpu")
    # What a first step loads (torch.optim alone brings 200 MB of libraries) belongs to the idle process.
    tiny = replace(options, classes=64 * world.size, batch=8 * world.size, dim=16, steps=1, path=None)
    head = _head(tiny, side, world, device, scratch / "tiny")
    _time_steps(head, tiny, world, device)
    if isinstance(head, PartialFC):
        head.close()
    memory = PeakMemory(device)
    head = _head(options, side, world, device, scratch)
    if isinstance(head, PartialFC) and not options.fresh:
        _create_all_rows(head)
    seconds_N4, traffic = _time_steps(head, options, world, device)
    slowest_N = world.all_reduce(seconds_N4.sum(dim=1), "max", name="bench/seconds")
    sizes = torch.tensor([memory.added_bytes(), _kept_bytes(head), memory.mapped_file_bytes()])
    added, kept, mapped = world.all_reduce(sizes, "max", name="bench/memory").tolist()
    # Only now: its matrices are no part of the head's memory, and must not hide any of it either.
    rates = measure_rates(device, options.batch, options.dim)
    if world.rank == 0:
        step_s = slowest_N.median().item()
        parts = zip(_PARTS, seconds_N4.median(dim=0).values.tolist(), strict=True)
        gflop = 6 * options.batch * options.dim * options.classes * options.sample_rate / world.size / 1e9
        impl = "textbook" if isinstance(head, TextbookHead) else head.kernel.name
        precision = "fp32" if impl in ("textbook", "plain") else options.precision
        line = {
            **asdict(options),
            "side": side,
            "impl": impl,
            "precision": precision,
            "step_s": round(step_s, 4),
            **{name: round(seconds, 4) for name, seconds in parts},
            "added_bytes": added,
            "kept_bytes": kept,
            "peak_bytes": added - kept,
            "mapped_file_bytes": mapped,
            "collectives": sum(traffic.calls.values()),
            "bytes": sum(traffic.num_bytes.values()),
            "bytes_by_name": dict(traffic.num_bytes),
            "gflops": round(gflop / step_s, 1),
            "share_of_matmul": round(gflop / step_s / rates.gflops[precision], 3),
            "matmul_gflops": {name: round(rate, 1) for name, rate in rates.gflops.items()},
            "memory_gbytes_per_s": round(rates.gbytes_per_s, 1),
            "torch": torch.__version__,
        }
        print(json.dumps(line, default=str), flush=True)
    if isinstance(head, PartialFC):
        head.close()
    world.close()


def _head(
    options: HeadOptions, side: str, world: World, device: torch.device, scratch: Path
) -> PartialFC | TextbookHead:
    if side == "textbook":
        return TextbookHead(options.classes, options.dim, CosFace(), options.sample_rate, world, device)
    storage = Storage(
        DTYPES[options.dtype],
        DTYPES[options.state_dtype],
        options.place,
        (options.path or scratch) if options.place == "disk" else None,
    )
    return PartialFC(
        options.classes,
        options.dim,
        CosFace(),
        options.sample_rate,
        world,
        optimizer=OPTIMIZERS[options.optimizer](),
        device=device,
        impl=options.impl,
        precision=options.precision,
        storage=storage,
    )


def _create_all_rows(head: PartialFC) -> None:
    """Gives all centres their start values, and their state memory: zeros take none until written to."""
    head.store.all_rows()
    for rows in head.row_state().values():
        for part in rows.split(4096):
            part.add_(0)


def _kept_bytes(head: PartialFC | TextbookHead) -> int:
    """Bytes of this process's centres and optimizer state."""
    if isinstance(head, TextbookHead):
        return 2 * head.weight_LD.numel() * head.weight_LD.element_size()
    return sum(rows.numel() * rows.element_size() for rows in head.row_state().values())


_PARTS = ("forward_s", "backward_s", "update_s", "communication_s")


def _time_steps(
    head: PartialFC | TextbookHead, options: HeadOptions, world: World, device: torch.device
) -> tuple[Tensor, Traffic]:
    """(seconds of _PARTS for each timed step, (steps, 4); what the last step sent). They add up to the step.

    Waiting for other ranks is no part of forward, backward and update, but communication."""
    rows = options.batch // options.num_processes
    generator = torch.Generator().manual_seed(world.rank)
    seconds: list[list[float]] = []
    for _ in range(options.steps + 1):
        feat_BD = torch.randn(rows, options.dim, generator=generator).to(device).requires_grad_()
        label_B = torch.randint(0, options.classes, (rows,), generator=generator).to(device)
        world.barrier()
        with world.count_traffic() as traffic:
            laps = [_now(world, device)]
            loss = head(feat_BD, label_B)
            laps.append(_now(world, device))
            loss.backward()
            laps.append(_now(world, device))
            head.step(0.1)
            laps.append(_now(world, device))
        busy = [(end - begin) - (waited - before) for (begin, before), (end, waited) in itertools.pairwise(laps)]
        seconds.append([*busy, laps[-1][1] - laps[0][1]])
    return torch.tensor(seconds[1:], dtype=torch.float64), traffic


def _now(world: World, device: torch.device) -> tuple[float, float]:
    synchronise(device)
    return time.perf_counter(), world.seconds_waiting


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    chosen_side, scratch = given.pop("side"), Path(given.pop("folder"))
    given["path"] = given["path"] and Path(given["path"])
    _worker(HeadOptions(**given), chosen_side, scratch)
