"""`partial-fc bench head`: time and memory of the head alone, on its own or against the textbook one.

Each measurement runs in fresh processes under torchrun; with --versus plain both sides run in turn, several times, and
the medians of the pairs' ratios are reported, since a machine's speed drifts.
"""

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import tyro

from benchmarks.textbook_head import TextbookHead
from partial_fc import comm
from partial_fc.head import CosFace, PartialFC


@dataclass(frozen=True)
class HeadOptions:
    """Trains the head on random features and prints one JSON line."""

    classes: int = 1_000_000
    """Classes over all processes."""
    sample_rate: float = 1.0
    """Share of the classes that are negatives in a step."""
    batch: int = 128
    """Global batch."""
    dim: int = 512
    """Width of a feature."""
    num_processes: Annotated[int, tyro.conf.arg(name="np")] = 2
    """Processes on this machine."""
    threads: int = 1
    """Threads of each process."""
    steps: int = 3
    """Timed steps, after one that is not; the median counts."""
    versus: Literal["none", "plain"] = "none"
    """plain: in turn with the textbook head (benchmarks/textbook_head.py)."""
    rounds: int = 3
    """Pairs of runs with --versus."""


def bench_head(options: HeadOptions) -> None:
    """Prints what was measured; ValueError where a run fails."""
    if options.batch % options.num_processes:
        raise ValueError(f"--batch {options.batch} is not divisible by --np {options.num_processes}")
    sides = ["ours"] if options.versus == "none" else ["ours", "textbook"]
    runs: list[dict[str, dict[str, Any]]] = []
    for _ in range(options.rounds if len(sides) == 2 else 1):
        runs.append({side: _run(options, side) for side in sides})
    line: dict[str, Any] = sorted((run["ours"] for run in runs), key=lambda r: r["step_s"])[len(runs) // 2]
    if len(sides) == 2:
        line["speedup"] = round(median(r["textbook"]["step_s"] / r["ours"]["step_s"] for r in runs), 2)
        line["memory_ratio"] = round(
            median(r["textbook"]["added_bytes"] / r["ours"]["added_bytes"] for r in runs), 2
        )
        line["textbook_step_s"] = round(median(r["textbook"]["step_s"] for r in runs), 4)
        line["textbook_added_bytes"] = int(median(r["textbook"]["added_bytes"] for r in runs))
    print(json.dumps(line))


def _run(options: HeadOptions, side: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={options.num_processes}", "-m", "benchmarks.head"]
    done = subprocess.run(
        [*command, json.dumps({**asdict(options), "side": side})],
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ValueError(f"the {side} side failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _worker(options: HeadOptions, side: str) -> None:
    world = comm.init()
    matmul_gflops = _matmul_gflops(options)
    idle = _resident_bytes()
    margin = CosFace()
    head: PartialFC | TextbookHead
    if side == "ours":
        head = PartialFC(options.classes, options.dim, margin, options.sample_rate, world)
        state_bytes = sum(t.numel() * t.element_size() for t in head.row_state().values())
    else:
        head = TextbookHead(options.classes, options.dim, margin, options.sample_rate, world)
        state_bytes = 2 * head.weight_LD.numel() * head.weight_LD.element_size()
    rows = options.batch // options.num_processes
    times: list[tuple[float, float, float]] = []
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(options.steps + 1):
        feat_BD = torch.randn(rows, options.dim, generator=generator).requires_grad_()
        label_B = torch.randint(0, options.classes, (rows,), generator=generator)
        world.barrier()
        with world.counted() as traffic:
            started = time.perf_counter()
            loss = head(feat_BD, label_B)
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            head.step(0.1)
            stepped = time.perf_counter()
        times.append((forward - started, backward - forward, stepped - backward))
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - idle
    worst = world.all_reduce(torch.tensor([added, state_bytes]), "max", name="bench/memory").tolist()
    if world.rank == 0:
        forward_s, backward_s, step_s = (median(part) for part in zip(*times[1:], strict=True))
        total = median(sum(t) for t in times[1:])
        gflop = 6 * options.batch * options.dim * options.classes * options.sample_rate / world.size / 1e9
        print(
            json.dumps(
                {
                    "side": side,
                    "step_s": round(total, 4),
                    "forward_s": round(forward_s, 4),
                    "backward_s": round(backward_s, 4),
                    "update_s": round(step_s, 4),
                    "added_bytes": int(worst[0]),
                    "peak_bytes": int(worst[0] - worst[1]),
                    "collectives": sum(traffic.calls.values()),
                    "bytes": sum(traffic.num_bytes.values()),
                    "gflops": round(gflop / total, 1),
                    "share_of_matmul": round(gflop / total / matmul_gflops, 3),
                    **asdict(options),
                }
            ),
            flush=True,
        )
    world.close()


def _matmul_gflops(options: HeadOptions) -> float:
    """float32 matrix product of the head's shape in this process, all processes at once: GFLOP/s."""
    a, b = torch.randn(options.batch, options.dim), torch.randn(options.dim, 8192)
    rates = []
    for _ in range(10):
        started = time.perf_counter()
        a @ b
        rates.append(2 * options.batch * options.dim * 8192 / 1e9 / (time.perf_counter() - started))
    return median(rates)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    chosen_side = given.pop("side")
    _worker(HeadOptions(**given), chosen_side)
