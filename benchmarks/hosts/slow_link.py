"""What gradient compression is worth on a slow link: the demo's job on two hosts whose cable is made slow.

    python -m benchmarks.hosts.slow_link --rates 100mbit 1gbit --compression none fp16 bf16

As root, on Linux (two_hosts.py makes the hosts, whose processes share this machine's cores). Every pair of
rate and compression runs in turn, so often as there are rounds, since a machine's speed drifts; medians are reported.
The data is the demo's where it is there (`make demo`), else made-up images of the same size and number of classes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import torch
import tyro

from benchmarks.demo_job import DEMO, demo_job
from benchmarks.hosts.two_hosts import ADDRESSES, TwoHosts, Unavailable, two_hosts
from partial_fc.train.record.curve import read_scalars

ROOT = Path(__file__).parents[2]
HOSTS = ",".join(f"{address}:1" for address in ADDRESSES)
REPORT_EVERY = 10  # steps; the first interval warms up and counts for nothing, as do the lines in it
_STEP_LINE = re.compile(r"step (\d+)/\d+ · ")  # of rank 0


@dataclass(frozen=True)
class Options:
    """Trains the demo for a few steps at each rate with each compression; prints a table and one JSON line."""

    rates: tuple[str, ...] = ("100mbit", "1gbit")
    """Rates of the link, each way, in the units of tc(8); `unlimited`: what this machine can."""
    compression: tuple[str, ...] = ("none", "fp16", "bf16")
    """Compression of the backbone's gradients, as --gradient-compression of the recipe takes them."""
    launcher: Literal["horovodrun --gloo", "horovodrun --mpi", "torchrun"] = "horovodrun --gloo"
    """Launcher of the process on each host."""
    steps: int = 60
    """Steps of each run; all but the first 10 are timed."""
    rounds: int = 3
    """Runs of each pair."""
    timeout_s: float = 600.0
    """A run that takes longer has failed."""
    flags: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """More flags of the recipe, for every run (after `--`)."""

    def __post_init__(self) -> None:
        if self.steps < 2 * REPORT_EVERY:
            raise ValueError(f"--steps is {self.steps}; expected at least {2 * REPORT_EVERY}")
        if self.rounds < 1:
            raise ValueError(f"--rounds is {self.rounds}; expected at least 1")


@dataclass(frozen=True)
class Measured:
    """One run, without its first steps."""

    images_per_s: float
    """Images a second, of both hosts."""
    step_bytes: float
    """Bytes that a host sent through the cable in a step, with all headers."""
    communication: float
    """Share of the time that rank 0 waited for the other."""
    loss: float
    """Loss after the last step."""


def main() -> int:
    """Status 1 where a run failed; the others are reported all the same."""
    options = tyro.cli(Options)
    pairs = [(rate, compression) for rate in options.rates for compression in options.compression]
    found: dict[tuple[str, str], list[Measured]] = {pair: [] for pair in pairs}
    failures: dict[tuple[str, str], str] = {}
    with two_hosts() as hosts:
        for number in range(options.rounds):
            for pair in pairs:
                if pair in failures:
                    continue
                started = time.monotonic()
                try:
                    measured = _train(hosts, options, *pair)
                except ValueError as error:
                    failures[pair] = str(error)
                    _say(f"round {number + 1}/{options.rounds} {_named(pair)}: FAILED\n{error}")
                    continue
                found[pair].append(measured)
                _say(
                    f"round {number + 1}/{options.rounds} {_named(pair)}: {measured.images_per_s:.0f} images/s, "
                    f"{measured.step_bytes:,.0f} bytes a step, loss {measured.loss:.4f}, "
                    f"{time.monotonic() - started:.0f} s"
                )
    rows = [_row(pair, found) for pair in pairs if found[pair]]
    _print_table(rows)
    line = {
        **asdict(options),
        "data": "demo/glyphs" if DEMO.exists() else "synthetic",
        "rows": rows,
        "failed": [_named(pair) for pair in failures],
        "cores": len(os.sched_getaffinity(0)),
        "tcp": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "torch": torch.__version__,
    }
    print(json.dumps(line), flush=True)
    return 1 if failures else 0


def _train(hosts: TwoHosts, options: Options, rate: str, compression: str) -> Measured:
    """ValueError with the end of what was printed, where the run fails."""
    hosts.limit(None if rate == "unlimited" else rate)
    with tempfile.TemporaryDirectory(prefix="slow-link-") as folder:
        flags = [*demo_job(options.steps, REPORT_EVERY), *options.flags]
        if compression != "none":
            flags += ["--gradient-compression", compression]
        lines: list[str] = []
        # (step, bytes sent by both hosts) where rank 0 reports
        marks: list[tuple[int, int]] = []
        with _launched(hosts, options, [*flags, "--models-root", folder]) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                step = _STEP_LINE.search(line)
                if step and int(step[1]) % REPORT_EVERY == 0:
                    sent = hosts.sent_bytes(0) + hosts.sent_bytes(1)
                    marks.append((int(step[1]), sent))
        result = Path(folder) / "result.json"
        if process.returncode or not result.exists() or len(marks) < 2:
            launcher_trace = "Traceback (most recent call last):\n"  # horovodrun's own says nothing of the cause
            own = lines[: lines.index(launcher_trace)] if launcher_trace in lines else lines
            raise ValueError(f"exit status {process.returncode}:\n{''.join(own[-30:])}")
        outcome = json.loads(result.read_text())
        waiting = dict(read_scalars(Path(folder))["time/communication"])
    (first_step, first_bytes), (last_step, last_bytes) = marks[0], marks[-1]
    return Measured(
        images_per_s=outcome["images_per_s"],
        step_bytes=(last_bytes - first_bytes) / (last_step - first_step) / 2,
        communication=median(waiting[step] for step, _ in marks[1:]),
        loss=outcome["loss"],
    )


@contextmanager
def _launched(hosts: TwoHosts, options: Options, flags: list[str]) -> Iterator[subprocess.Popen]:
    """The first host's launcher, its output in a pipe; torchrun's on the second host runs beside it."""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # the hosts share the cores, each believes to have all
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    limit = ["timeout", "--kill-after=5", str(options.timeout_s)]
    if options.launcher == "torchrun":
        meet = ["--nproc_per_node=1", f"--master_addr={ADDRESSES[0]}", "--master_port=29500", "--no-python"]
        launches = [["torchrun", "--nnodes=2", f"--node_rank={host}", *meet] for host in (0, 1)]
    else:
        launches = [[*options.launcher.split(), "-np", "2", "-H", HOSTS, "--disable-cache"]]
        launches[0] += ["--network-interfaces", "eth0"]
    outputs = [subprocess.PIPE, subprocess.DEVNULL]
    processes = [
        hosts.start(
            host,
            [*limit, *launch, "bash", "config.sh", *flags],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=outputs[host],
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, launch in enumerate(launches)
    ]
    yield processes[0]
    for process in processes:
        process.wait()


def _row(pair: tuple[str, str], found: dict[tuple[str, str], list[Measured]]) -> dict[str, str | float]:
    """Medians; the speed-up is the median of the rounds' own ratios to no compression."""
    rate, compression = pair
    runs, plain = found[pair], found.get((rate, "none"), [])
    row: dict[str, str | float] = {"rate": rate, "compression": compression, "runs": len(runs)}
    row["images_per_s"] = round(median(run.images_per_s for run in runs), 1)
    if len(plain) == len(runs):
        ratios = [ours.images_per_s / other.images_per_s for ours, other in zip(runs, plain, strict=True)]
        row["speedup"] = round(median(ratios), 2)
    row["step_bytes"] = round(median(run.step_bytes for run in runs))
    row["communication"] = round(median(run.communication for run in runs), 2)
    row["loss"] = round(median(run.loss for run in runs), 4)
    return row


def _print_table(rows: list[dict[str, str | float]]) -> None:
    print("| link | compression | images/s | speed-up | bytes a step and host | waiting | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['rate']} | {row['compression']} | {row['images_per_s']:.0f} | {row.get('speedup', '')} | "
            f"{row['step_bytes']:,} | {row['communication']:.0%} | {row['loss']} |"
        )


def _named(pair: tuple[str, str]) -> str:
    return f"{pair[0]}, {pair[1]}"


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Unavailable, ValueError) as error:
        sys.exit(f"slow_link: {error}")
