"""What a second host is worth to recipe kinetics: the clips/s of two hosts over those of one.

    python -m demo motion --out motion --num-train 192 --num-val 12
    python -m benchmarks.hosts.second_host --data motion --widths 8 16 --rates unlimited 1gbit

As root, on Linux (two_hosts.py makes the hosts). Each host has one core of this machine, for all that it
does: the reader, the network, what goes through the cable. These jobs are compared: a host alone, while the other core
idles; both hosts at once, each for itself, which is what two cores of one machine leave each other; and both together,
with each compression at each rate of the cable. All are started first and then go on in turn, a few updates each,
while the others are stopped (SIGSTOP). A turn of each host for itself comes before each of the others, and the ratio is
of these two: what else the machine does meets both.
"""

import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
import tyro

from benchmarks.hosts.two_hosts import ADDRESSES, TwoHosts, Unavailable, two_hosts

ROOT = Path(__file__).parents[2]
WARM_UP = 3  # updates of each job before all begin to take turns
# What is still on its way from a job that was stopped.
_QUIET_S = 0.05
_PATIENCE_S = 300.0
# The recipe's command of docs/recipes/kinetics.md, without validation.
JOB = (
    "train.py kinetics --dataset custom --train-only --model slowfast_4x16_resnet50_kinetics400 --dropout 0.2 "
    "--video-loader --num-classes 12 --num-data-workers 1 --new-height 72 --new-width 72 --input-size 64 "
    "--scale-ratios 1.0,0.9 --no-mirror --lr-mode cosine --lr 0.05 --wd 1e-4 --num-epochs 1 --log-interval 1 "
    "--save-frequency 0 --check-data off --kvstore dist_sync_device"
)
_LINE = re.compile(r"worker 0: Epoch\[\d+\] Batch .*Speed: ([\d.]+) samples/sec.*communication (\d+)%")


@dataclass(frozen=True)
class Options:
    """Trains for a few updates on one host and on two; prints a table and one JSON line."""

    data: Path
    """Clips of `python -m demo motion`; few are enough, they are read again and again."""
    widths: tuple[int, ...] = (8,)
    """--width of the recipe."""
    compression: tuple[str, ...] = ("none", "fp16", "bf16")
    """--gradient-compression of the recipe."""
    rates: tuple[str, ...] = ("unlimited", "1gbit")
    """Rates of the cable, each way, in the units of tc(8); `unlimited`: what this machine can."""
    batch_size: int = 8
    """Clips of a process in an update."""
    updates: int = 3
    """Timed updates of a turn; one before them is not."""
    rounds: int = 5
    """Turns of each job at each rate."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.updates < 1:
            raise ValueError(f"--rounds {self.rounds}, --updates {self.updates}: expected at least 1 of each")
        if len(os.sched_getaffinity(0)) < 2:
            raise ValueError("this machine, or this process, has one core; two hosts need one each")

    def most_updates(self) -> int:
        """Of the job that has most turns, and some: none must come to its end, where it would write a checkpoint."""
        turns = self.rounds * (1 + len(self.compression) * len(self.rates))
        return WARM_UP + turns * (self.updates + 4) + 10


class Update(NamedTuple):
    """One update, as the first worker saw it. Since the start: processor time of a process, bytes of both hosts."""

    clips_per_s: float
    waiting: float
    sent_bytes: int
    cpu_s: float


class Turn(NamedTuple):
    """Some updates in a row: medians; means of what an update took of a core, and of what a host sent."""

    clips_per_s: float
    waiting: float
    step_bytes: float
    step_cpu_s: float


class Worker:
    """`partial-fc launch` on a host, whose first worker's lines are followed, and the training that it has started."""

    def __init__(self, hosts: TwoHosts, host: int, command: list[str]):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = hosts.start(host, command, cwd=ROOT, env=env, text=True, **pipes)
        self._hosts, self._save_dir = hosts, command[-1]
        self._trainers: list[psutil.Process] = []
        self._updates: queue.Queue[Update | None] = queue.Queue()
        self._last_lines: deque[str] = deque(maxlen=30)
        threading.Thread(target=self._follow, daemon=True).start()
        self.next_updates(WARM_UP)
        self._trainers = [process for process in psutil.process_iter(["cmdline"]) if self._trains(process)]
        self.stop()

    def stop(self) -> None:
        for trainer in self._trainers:
            trainer.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        while not self._updates.empty():
            self._updates.get()
        for trainer in self._trainers:
            trainer.send_signal(signal.SIGCONT)

    def next_updates(self, count: int) -> list[Update]:
        """Waits for them. Raises ValueError with the end of what was printed, where the job has ended or hangs."""
        found: list[Update] = []
        while len(found) < count:
            try:
                update = self._updates.get(timeout=_PATIENCE_S)
            except queue.Empty:
                update = None
            if update is None:
                raise ValueError(f"no update within {_PATIENCE_S:g} s, or ended:\n{''.join(self._last_lines)}")
            found.append(update)
        return found

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_lines.append(line)
            if match := _LINE.match(line):
                sent = self._hosts.sent_bytes(0) + self._hosts.sent_bytes(1)
                self._updates.put(Update(float(match[1]), int(match[2]) / 100, sent, self._cpu_s()))
        self._updates.put(None)

    def _cpu_s(self) -> float:
        times = [trainer.cpu_times() for trainer in self._trainers]
        return sum(t.user + t.system for t in times) / max(1, len(times))

    def _trains(self, process: psutil.Process) -> bool:
        """The launcher, which must not be stopped, has these words behind others."""
        words = process.info["cmdline"] or []
        return words[1:3] == ["train.py", "kinetics"] and self._save_dir in words


class Pair(NamedTuple):
    """Turns one after the other: each host for itself, then the two together (or one alone)."""

    apart: Turn
    ours: Turn

    @property
    def ratio(self) -> float:
        return self.ours.clips_per_s / self.apart.clips_per_s


def main() -> int:
    options = tyro.cli(Options)
    found: dict[tuple[int, str, str], list[Pair]] = {}
    with two_hosts() as hosts, tempfile.TemporaryDirectory(prefix="second-host-") as name:
        jobs: dict[tuple[int, str], list[Worker]] = {}
        for width in options.widths:
            flags = _flags(options, Path(name), width)
            for kind in ("alone", "apart", *options.compression):
                jobs[width, kind] = _started(hosts, Path(name), kind, flags, f"{name}/{width}-{kind}")
        _say(f"{len(jobs)} jobs take turns")
        for number in range(options.rounds):
            for (width, kind), workers in jobs.items():
                for rate in {"alone": ("unlimited",), "apart": ()}.get(kind, options.rates):
                    hosts.limit(None if rate == "unlimited" else rate)
                    pair = Pair(_turn(jobs[width, "apart"], options.updates), _turn(workers, options.updates))
                    found.setdefault((width, kind, rate), []).append(pair)
                    _say(
                        f"round {number + 1}, width {width}, {kind}, {rate}: {pair.ours.clips_per_s:.2f} clips/s; "
                        f"a host for itself {pair.apart.clips_per_s:.2f}"
                    )
    rows = [_row(found[key], *key) for key in found]
    _print_table(rows)
    told = {**asdict(options), "data": str(options.data), "rows": rows, "torch": torch.__version__}
    print(json.dumps(told), flush=True)
    return 0


def _started(hosts: TwoHosts, folder: Path, kind: str, flags: list[str], save_dir: str) -> list[Worker]:
    """A launch on the first host; for "apart" one on each."""
    hosts.limit(None)
    if kind in ("alone", "apart"):
        numbers = (0, 1) if kind == "apart" else (0,)
        each = [([ADDRESSES[host]], str(host), [*flags, "--save-dir", f"{save_dir}-{host}"]) for host in numbers]
    else:
        each = [(list(ADDRESSES), "$RANK", [*flags, "--gradient-compression", kind, "--save-dir", save_dir])]
    return [Worker(hosts, host, _launch(folder, *what)) for host, what in enumerate(each)]


def _launch(folder: Path, addresses: Sequence[str], core: str, flags: list[str]) -> list[str]:
    """One process a host, each on one core; also for one host, so that all are started alike."""
    host_file = folder / f"{'-'.join(addresses)}.txt"
    host_file.write_text("".join(f"{address}\n" for address in addresses))
    on_core = ["sh", "-c", f'exec taskset --cpu-list {core} "$@"', "sh"]
    launch = ["partial-fc", "launch", "-n", str(len(addresses)), "-H", str(host_file)]
    return [*launch, *on_core, sys.executable, *shlex.split(JOB), *flags]


def _flags(options: Options, folder: Path, width: int) -> list[str]:
    """All updates are within one epoch: its end is not timed."""
    lines = (options.data / "train.txt").read_text().splitlines()
    needed = 2 * options.batch_size * options.most_updates()
    train_list = folder / "train.txt"
    train_list.write_text("\n".join((lines * (needed // len(lines) + 1))[:needed]) + "\n")
    lists = ["--data-dir", str(options.data.absolute()), "--train-list", str(train_list)]
    return [*lists, "--width", str(width), "--batch-size", str(options.batch_size)]


def _turn(workers: list[Worker], updates: int) -> Turn:
    """Of several workers, each for itself, the mean."""
    for worker in workers:
        worker.go_on()
    turns = [_of(worker.next_updates(1 + updates)) for worker in workers]
    for worker in workers:
        worker.stop()
    time.sleep(_QUIET_S)
    speed, cpu_s = (sum(turn[at] for turn in turns) / len(turns) for at in (0, 3))
    return Turn(speed, turns[0].waiting, turns[0].step_bytes, cpu_s)


def _of(updates: list[Update]) -> Turn:
    """The first one began before the turn."""
    counted = updates[1:]
    sent = (counted[-1].sent_bytes - updates[0].sent_bytes) / len(counted) / 2
    cpu_s = (counted[-1].cpu_s - updates[0].cpu_s) / len(counted)
    return Turn(median(u.clips_per_s for u in counted), median(u.waiting for u in counted), sent, cpu_s)


def _row(pairs: list[Pair], width: int, kind: str, rate: str) -> dict[str, Any]:
    """Medians of the pairs. Of two hosts the efficiency is over twice the speed of one, of one alone over one."""
    hosts = 1 if kind == "alone" else 2
    ratios = [pair.ratio / hosts for pair in pairs]
    return {
        "width": width,
        "rate": rate,
        "kind": kind,
        "clips_per_s": round(median(pair.ours.clips_per_s for pair in pairs), 2),
        "efficiency": round(median(ratios), 3),
        "range": f"{min(ratios):.2f} to {max(ratios):.2f}",
        "cpu_ms": round(median(pair.ours.step_cpu_s for pair in pairs) * 1000),
        "cpu_ratio": round(median(pair.ours.step_cpu_s / pair.apart.step_cpu_s for pair in pairs), 3),
        "step_bytes": round(median(pair.ours.step_bytes for pair in pairs)),
        "waiting": round(median(pair.ours.waiting for pair in pairs), 2),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    print("| width | link | compression | clips/s | efficiency | processor time an update | bytes an update and host |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['width']} | {row['rate']} | {row['kind']} | {row['clips_per_s']:.1f} | {row['efficiency']:.2f} "
            f"({row['range']}) | {row['cpu_ms']} ms ({row['cpu_ratio']:.2f}) | {row['step_bytes']:,} |"
        )


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Unavailable, ValueError) as error:
        sys.exit(f"second_host: {error}")
