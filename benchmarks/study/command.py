"""The command line of a study: one run, what is missing, several side by side, and some again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from .cells import Cell
from .run import BITS_DEPEND_ON, RESULTS, ROOT, Data, here, run, write


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every study takes."""

    cell: Annotated[str | None, tyro.conf.Positional] = None
    """SET-ARM, as split-0.1; --missing lists them."""
    seed: Annotated[int | None, tyro.conf.Positional] = None
    """Of the initialisation, the order of the images, their augmentation and the sampled classes."""
    missing: bool = False
    """List the registered runs without a result."""
    jobs: int = 0
    """Run what is missing, so many at a time, each with one thread."""
    minutes: float = float("inf")
    """With --jobs: after so many, no run is begun."""
    repeat: int = 0
    """Run so many finished runs of this kind of processor again, and compare their figures bit by bit."""
    analyse: bool = False
    """Print tables, intervals and tests, and draw the study's picture in docs/pictures."""
    folder: Path = ROOT / "runs/study"
    """Where sets are drawn and runs are trained; results do not stay there."""


@dataclass(frozen=True)
class Study:
    """name: of its module and of the folder of its results. arms: the trainer's flags. data: of (cell, options); draws
    what is not there."""

    name: str
    arms: dict[str, str]
    runs: list[tuple[Cell, int]]
    data: Callable[[Cell, Any], Data]
    analyse: Callable[[Path], None]

    @property
    def results(self) -> Path:
        return RESULTS / self.name

    def main(self, options_class: type[Options], description: str | None) -> None:
        os.nice(19)
        try:
            self.do(tyro.cli(options_class, description=description))
        except ValueError as error:
            sys.exit(f"{self.name}: {error}")

    def do(self, options: Options) -> None:
        if options.missing:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--missing | head` ends quietly, as other tools do
            print("\n".join(f"{cell} {seed}" for cell, seed in self.missing()))
        elif options.jobs:
            self.side_by_side(options)
        elif options.repeat:
            self.repeat(options)
        elif options.analyse:
            self.analyse(self.results)
        elif options.cell and options.seed is not None:
            self.one(options, Cell.parse(options.cell), options.seed)
        else:
            raise ValueError("nothing to do: give CELL SEED, --missing, --jobs N, --repeat N or --analyse; see --help")

    def result(self, cell: Cell, seed: int) -> Path:
        return self.results / f"{cell}-{seed}.json"

    def missing(self) -> list[tuple[Cell, int]]:
        return [(cell, seed) for cell, seed in self.runs if not self.result(cell, seed).exists()]

    def run(self, options: Options, cell: Cell, seed: int, data: Data) -> dict[str, Any]:
        return run(options.folder / "runs" / f"{cell}-{seed}", cell, seed, data, self.arms[cell.arm])

    def one(self, options: Options, cell: Cell, seed: int) -> None:
        """Writes a run's result, or why it failed."""
        if cell.arm not in self.arms:
            raise ValueError(f"cell {cell}: expected an arm of {', '.join(self.arms)}")
        path = self.result(cell, seed)
        if path.exists():
            raise ValueError(f"{path} is there; --repeat compares another run with it")
        data = self.data(cell, options)
        try:
            write(path, self.run(options, cell, seed, data))
        except ValueError as error:
            number = len(list(self.results.glob(f"{cell}-{seed}.failed*")))
            failed = path.with_name(f"{cell}-{seed}.failed{number}")
            write(failed, {"cell": str(cell), "seed": seed, "error": str(error), "made_by": here()})
            raise ValueError(f"{failed}: {error}") from error
        print(path)

    def side_by_side(self, options: Options) -> None:
        """Runs what is missing. Raises ValueError, at the end, if runs failed; they are not tried again."""
        began, left, failed, drawn = time.monotonic(), self.missing(), [], set()
        running: dict[subprocess.Popen[bytes], str] = {}
        while left or running:
            while left and len(running) < options.jobs and time.monotonic() - began < 60 * options.minutes:
                cell, seed = left.pop(0)
                if cell.set not in drawn:  # here, not by two jobs at once
                    self.data(cell, options)
                    drawn.add(cell.set)
                command = [sys.executable, "-m", f"benchmarks.{self.name}", str(cell), str(seed)]
                running[subprocess.Popen([*command, "--folder", options.folder], cwd=ROOT)] = f"{cell} {seed}"
            if not running:
                break
            for process in [process for process in running if process.poll() is not None]:
                name = running.pop(process)
                failed += [name] * (process.returncode != 0)
                print(f"[{time.strftime('%H:%M:%S')}] {name}: exit status {process.returncode}", flush=True)
            time.sleep(1)
        if failed:
            raise ValueError(f"failed: {', '.join(failed)}")

    def repeat(self, options: Options) -> None:
        """Raises ValueError if a figure differs, or if no run was made by such a processor with these libraries."""
        stored = {run: json.loads(path.read_text()) for run in self.runs if (path := self.result(*run)).exists()}
        ours = {fact: here()[fact] for fact in BITS_DEPEND_ON}
        done = [run for run, one in stored.items() if ours.items() <= one["made_by"].items()]
        if not done:
            raise ValueError(f"no result was made with {ours}; others have other bits")
        for cell, seed in random.SystemRandom().sample(done, min(options.repeat, len(done))):
            again = json.loads(json.dumps(self.run(options, cell, seed, self.data(cell, options))))
            if again["made_by"]["data"] != stored[cell, seed]["made_by"]["data"]:
                raise ValueError(f"{cell} {seed}: its set, drawn from this machine's fonts, is not that of the result")
            if again["figures"] != stored[cell, seed]["figures"]:
                raise ValueError(f"{cell} {seed}: other figures:\n{stored[cell, seed]['figures']}\n{again['figures']}")
            print(f"{cell} {seed}: all {len(json.dumps(again['figures']))} characters of its figures are equal",
                  flush=True)  # fmt: skip
