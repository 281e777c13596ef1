"""Two processes of a thread on two cores: the demo's job under every launcher, beside one process and two unrelated
ones.

    python -m benchmarks.hosts.launchers
    python -m benchmarks.hosts.launchers --rounds 5 -- --precision fp32

All run in turn, so often as there are rounds, since a machine's speed drifts; medians are reported, ratios are medians
of the rounds' own. The data is the demo's where it is there (`make demo`), else made-up images of the same size and
number of classes. The threads are those of the network; the loader's come on top, as they do in training.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import psutil
import torch
import tyro

from benchmarks.demo_job import DEMO, demo_job
from partial_fc.train.record.curve import read_scalars

ROOT = Path(__file__).parents[2]
REPORT_EVERY = 10  # steps; what is before the second line of these warms up and counts for nothing
_STEP_LINE = re.compile(r"step (?P<step>\d+)/\d+ · ")  # of rank 0
_CONFIG = ["bash", "config.sh"]
# As somebody types it who does without config.sh.
_BARE = ["python", "train.py", "face", "--dataset", "glyphs", "--rec", str(DEMO)]
_TORCHRUN = ["torchrun", "--standalone", "--nproc_per_node=2", "--no-python"]
_HOROVODRUN = ["horovodrun", "-np", "2", "-H", "localhost:2"]
ONE, APART, OWN = "one process", "two unrelated ones", "own launch"


@dataclass(frozen=True)
class Way:
    """How a job is started. copies: so many jobs at once, that know nothing of each other."""

    command: list[str]
    threads: int = 1
    flags: tuple[str, ...] = ()
    copies: int = 1


WAYS = {
    ONE: Way(_CONFIG),
    APART: Way(_CONFIG, copies=2),
    "one process, two threads": Way(_CONFIG, threads=2, flags=("--batch-size", "128")),
    OWN: Way(_CONFIG, flags=("--gpus", "2")),
    "torchrun": Way([*_TORCHRUN, *_CONFIG]),
    "horovodrun": Way([*_HOROVODRUN, *_CONFIG]),
    "horovodrun --gloo": Way([*_HOROVODRUN, "--gloo", *_CONFIG]),
    "run.sh": Way(["bash", "run.sh"]),
    "own launch, train.py": Way(_BARE, flags=("--gpus", "2")),
    "horovodrun, train.py": Way([*_HOROVODRUN, *_BARE]),
    "horovodrun --gloo, train.py": Way([*_HOROVODRUN, "--gloo", *_BARE]),
}


@dataclass(frozen=True)
class Options:
    """Trains the demo for a few steps under each launcher; prints a table and one JSON line."""

    ways: tuple[str, ...] = tuple(WAYS)
    """Which of them, by the names of the table's rows."""
    steps: int = 80
    """Steps of each run; all but the first 20 are timed."""
    rounds: int = 3
    """Runs of each."""
    timeout_s: float = 300.0
    """A run that takes longer has failed."""
    flags: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """More flags of the recipe, for every run (after `--`)."""

    def __post_init__(self) -> None:
        if self.steps < 4 * REPORT_EVERY:
            raise ValueError(f"--steps is {self.steps}; expected at least {4 * REPORT_EVERY}")
        if self.rounds < 1:
            raise ValueError(f"--rounds is {self.rounds}; expected at least 1")
        if unknown := sorted(set(self.ways) - WAYS.keys()):
            raise ValueError(f"--ways {unknown[0]!r}; expected some of: {'; '.join(WAYS)}")


class Measured(NamedTuple):
    """One run, without its first steps. cpu_s_per_1000: processor time of all processes for 1,000 images. cores: that
    were busy with them. waiting, data: shares of the time that rank 0 waited for others, and for batches."""

    images_per_s: float
    cpu_s_per_1000: float
    cores: float
    waiting: float
    data: float
    loss: float


def main() -> int:
    """Status 1 where a run failed; the others are reported all the same."""
    options = tyro.cli(Options)
    found: dict[str, list[Measured]] = {name: [] for name in options.ways}
    failed: dict[str, str] = {}
    for number in range(options.rounds):
        for name in options.ways:
            if name in failed:
                continue
            try:
                measured = _measure(WAYS[name], options)
            except ValueError as error:
                failed[name] = str(error)
                _say(f"round {number + 1}/{options.rounds} {name}: FAILED\n{error}")
                continue
            found[name].append(measured)
            _say(f"round {number + 1}/{options.rounds} {name}: {_in_words(measured)}")
    rows = [_row(name, found) for name in options.ways if found[name]]
    _print_table(rows)
    line = {
        **asdict(options),
        "data": "demo/glyphs" if DEMO.exists() else "synthetic",
        "rows": rows,
        "failed": list(failed),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }
    print(json.dumps(line), flush=True)
    return 1 if failed else 0


class Job:
    """A training under way, whose lines are read."""

    def __init__(self, way: Way, options: Options, folder: str):
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "OMP_NUM_THREADS": str(way.threads), "PATH": programs}
        flags = [*demo_job(options.steps, REPORT_EVERY), *way.flags, *options.flags, "--models-root", folder]
        command = ["timeout", "--kill-after=5", str(options.timeout_s), *way.command, *flags]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)  # type: ignore[call-overload]
        self._lines: list[str] = []
        self._folder = Path(folder)

    def to_step(self, wanted: int) -> None:
        """Reads on to the line of this step. Raises ValueError with the end of what was printed, where none comes."""
        for line in self._process.stdout:
            self._lines.append(line)
            if (step := _STEP_LINE.search(line)) and int(step["step"]) == wanted:
                return
        raise ValueError(f"no step {wanted}, status {self._process.wait()}:\n{''.join(self._lines[-30:])}")

    def cpu_s(self) -> float:
        """Of all processes that it has now, since their start."""
        total = 0.0
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue  # one of the launcher's own helpers
            total += times.user + times.system
        return total

    def share(self, part: str, step: int) -> float:
        """Of the time before this step's line; 0 where the part has none."""
        return dict(read_scalars(self._folder).get(f"time/{part}", [])).get(step, 0.0)

    def result(self) -> dict[str, float]:
        """What it has written. Raises ValueError where it failed."""
        self._lines += self._process.stdout
        result = self._folder / "result.json"
        if self._process.wait() or not result.exists():
            raise ValueError(f"exit status {self._process.returncode}:\n{''.join(self._lines[-30:])}")
        return json.loads(result.read_text())


def _measure(way: Way, options: Options) -> Measured:
    """Raises ValueError with the end of what was printed, where the run fails."""
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="launchers-")) for _ in range(way.copies)]
        jobs = [Job(way, options, folder) for folder in folders]
        for job in jobs:
            job.to_step(2 * REPORT_EVERY)
        began, before = time.perf_counter(), sum(job.cpu_s() for job in jobs)
        last = options.steps - REPORT_EVERY
        jobs[0].to_step(last)
        cores = (sum(job.cpu_s() for job in jobs) - before) / (time.perf_counter() - began)
        results = [job.result() for job in jobs]
        waiting, data = jobs[0].share("communication", last), jobs[0].share("data", last)
    rate = sum(result["images_per_s"] for result in results)
    return Measured(rate, 1000 * cores / rate, cores, waiting, data, results[0]["loss"])


def _row(name: str, found: dict[str, list[Measured]]) -> dict[str, str | float]:
    """Medians; a ratio is the median of those of the rounds."""
    runs = found[name]
    row: dict[str, str | float] = {"way": name, "runs": len(runs)}
    for field, digits in (("images_per_s", 1), ("cpu_s_per_1000", 3), ("cores", 2), ("waiting", 2), ("data", 2)):
        row[field] = round(median(getattr(run, field) for run in runs), digits)
    for title, other, times in (("to_own", OWN, 1), ("to_twice_one", ONE, 2)):
        if len(found.get(other, [])) == len(runs):
            ratios = [ours.images_per_s / theirs.images_per_s for ours, theirs in zip(runs, found[other], strict=True)]
            row[title] = round(median(ratios) / times, 3)
    row["loss"] = round(runs[-1].loss, 5)
    return row


def _print_table(rows: list[dict[str, str | float]]) -> None:
    print("| | images/s | of own launch | of twice one | CPU s for 1,000 images | cores busy | waiting | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['way']} | {row['images_per_s']:.0f} | {row.get('to_own', '')} | {row.get('to_twice_one', '')} | "
            f"{row['cpu_s_per_1000']:.2f} | {row['cores']:.2f} | {row['waiting']:.0%} | {row['loss']} |"
        )


def _in_words(measured: Measured) -> str:
    return (
        f"{measured.images_per_s:.0f} images/s, {measured.cpu_s_per_1000:.2f} CPU s for 1,000, {measured.cores:.2f} "
        f"cores, waiting {measured.waiting:.0%}, data {measured.data:.0%}, loss {measured.loss:.5f}"
    )


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"launchers: {error}")
