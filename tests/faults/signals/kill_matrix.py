"""Sends every signal to every process of every launcher's job, takes away what it prints to, and starts the same
command again:

    python -m tests.faults.signals.kill_matrix FOLDER                          all cells; compares with what is promised
    python -m tests.faults.signals.kill_matrix FOLDER --launches torchrun --record      and keeps what was seen

`python -m tests.faults.signals.kill_table --write` puts what is kept (kill_matrix.json) into docs/reliability.md.
For each launcher and target there is one run that gets one signal after the other, each in the middle between two
checkpoints, and is started again where it has ended. At the end its losses and its last checkpoint must be, bit for
bit, those of a run that nobody disturbed.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.kills import complete
from tests.faults.signals.kill_table import OUTPUT, OUTPUT_COLUMNS, RESULTS, Cell, differences, keep
from tests.faults.signals.launches import EVERY, LAUNCHES, Started, set_pace
from tests.faults.signals.outputs import OUTPUTS, File
from tests.running import same_tensors, steps_done

SIGNALS = ("STOP", "KILL", "TERM", "USR1", "HUP", "INT")  # STOP, which should end nothing, first
STOPPED_S = 30.0
GONE_S = 10.0  # after a signal nothing may be left, unless the run goes on
_GONE_UNREAD_S = 20.0  # where what waits to be printed is waited for
NUM_STEPS = 600
_END_S = 900.0  # of all steps, on a machine that has much else to do
_FLAGS = ["--checkpoint-every", str(EVERY), "--max-steps", str(NUM_STEPS)]
_PACE_S = 0.2
_PACE_STOPPED_S = 1.0  # others than a stopped one train on


@dataclass(frozen=True)
class Chain:
    """One run, and the signals that one of its processes gets; of the target OUTPUT: what becomes of its output."""

    launch: str
    target: str
    signals: Sequence[str] = SIGNALS

    def play(self, folder: Path, whole: Path | None, pace_s: float = _PACE_S) -> list[Cell]:
        """whole: models_root of a run that was not disturbed; none: what follows on the last signal is not looked at.
        AssertionError: it does not go on, or its end is another one."""
        cells: list[Cell] = []
        set_pace(folder, pace_s)
        with _started(self, folder) as job:
            for name in self.signals:
                job.trains(name)
                cells.append(_cell(job.now, self, name))
                print(json.dumps(asdict(cells[-1])), flush=True)
            if whole is None:
                return cells
            set_pace(folder, 0)
            if job.now.process.poll() is None:
                assert job.now.process.wait(_END_S) == 0, job.now.printed[-3000:]
            else:
                job.trains("", to_the_end=True)
        check_equal(whole, folder / "run")
        return cells


@dataclass
class _Job:
    """The run of a chain: what is running now, or has ended last."""

    start: Callable[[str], Started]
    now: Started

    def trains(self, name: str, to_the_end: bool = False) -> None:
        """Started again where it has ended: from the newest checkpoint. name: what comes next."""
        if self.now.process.poll() is not None:
            newest = complete(self.now.root)[-1]
            self.now = self.start(name)
            if to_the_end:
                assert self.now.process.wait(_END_S) == 0, self.now.printed[-3000:]
            else:
                self.now.wait_until_it_trains()
            log = (self.now.root / "training.log").read_text()
            assert f"resumed from {newest}" in log, self.now.printed[-3000:]
        else:
            self.now.wait_until_it_trains()


@contextmanager
def _started(chain: Chain, folder: Path) -> Iterator[_Job]:
    def start(name: str) -> Started:
        return Started(chain.launch, folder, _FLAGS, output=OUTPUTS.get(name, File))

    job = _Job(start, start(chain.signals[0]))
    try:
        yield job
    finally:
        job.now.kill()


def _cell(job: Started, chain: Chain, name: str) -> Cell:
    """What becomes of the run when the target gets the signal."""
    _between_checkpoints(job)
    before = steps_done(job.root)
    begin = time.monotonic()
    target, gone_s = job.process.pid, GONE_S
    if chain.target == OUTPUT:
        job.output.strike(job.process, lambda: _between_checkpoints(job, before + EVERY))
        begin, gone_s = time.monotonic(), _GONE_UNREAD_S
    else:
        target = job.pid_of(chain.target)
        os.kill(target, getattr(signal, f"SIG{name}"))
    if name == "STOP":
        set_pace(job.folder, _PACE_STOPPED_S)
        time.sleep(STOPPED_S)
        set_pace(job.folder, _PACE_S)
        if Path(f"/proc/{target}").exists():
            os.kill(target, signal.SIGCONT)
        begin = time.monotonic()
    while (left := job.left()) and time.monotonic() < begin + gone_s:
        if name in ("STOP", "FULL") and steps_done(job.root) > before + 5:
            break
        time.sleep(0.05)
    seconds = round(time.monotonic() - begin, 1)
    if left and job.process.poll() is None and _goes_on(job):
        if name == "STALL":  # nobody reads: it would wait at its end
            job.kill()
        return Cell(chain.launch, chain.target, name, "goes on", None, 0, None, None)
    status = None if job.process.pid in left else job.process.wait()
    ends = "left over" if left else "saved" if _has_saved(job.root) else "ends"
    job.kill()
    step = steps_done(job.root)
    lost = step - int(complete(job.root)[-1].name.removeprefix("step-"))
    return Cell(chain.launch, chain.target, name, ends, _as_a_shell_has_it(status), len(left), seconds, lost)


def _between_checkpoints(job: Started, least: int = 0) -> None:
    """Returns in the middle between two checkpoints, after the first of this start and so many steps."""
    while not (steps_done(job.root) >= least and steps_done(job.root) % EVERY in range(5, 10) and complete(job.root)):
        assert job.process.poll() is None, job.printed[-3000:]
        time.sleep(0.01)


def _goes_on(job: Started) -> bool:
    """Both ranks train, later than GONE_S after the signal."""
    before, deadline = steps_done(job.root), time.monotonic() + 60
    while steps_done(job.root) in range(before, before + 3):  # fewer: it went back to a checkpoint
        if job.process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return {job.pid_of("rank 0"), job.pid_of("rank 1")} <= set(job.left())


def _has_saved(root: Path) -> bool:
    """Whether the last step is in a checkpoint, which is none of those that are due anyway."""
    last = steps_done(root)
    return last % EVERY != 0 and complete(root)[-1].name == f"step-{last:08d}"


def check_equal(whole: Path, disturbed: Path) -> None:
    """Bit for bit: the losses, and all tensors of the last checkpoint. AssertionError: they are not."""
    assert (whole / "loss.csv").read_text() == (disturbed / "loss.csv").read_text(), "other losses"
    one, two = complete(whole)[-1], complete(disturbed)[-1]
    assert one.name == two.name
    same_tensors(one, two)


def _as_a_shell_has_it(status: int | None) -> int | None:
    return status if status is None or status >= 0 else 128 - status


def undisturbed(folder: Path, flags: list[str]) -> Path:
    """models_root of a run that nobody has disturbed."""
    whole = Started("own launch", folder, flags)
    try:
        assert whole.process.wait(_END_S) == 0, whole.printed[-3000:]
    finally:
        whole.kill()
    return whole.root


def play(folder: Path, chains: Sequence[Chain], at_once: int) -> tuple[list[Cell], list[str]]:
    """What was seen, and the chains that went wrong."""
    whole = undisturbed(folder / "whole", _FLAGS)
    cells, wrong = [], []
    with ThreadPoolExecutor(at_once) as pool:
        names = [f"{number}-{chain.launch}-{chain.target}".replace(" ", "-") for number, chain in enumerate(chains)]
        futures = [pool.submit(chain.play, folder / name, whole) for name, chain in zip(names, chains, strict=True)]
        for chain, future in zip(chains, futures, strict=True):
            try:
                cells += future.result()
            except AssertionError as error:
                wrong.append(f"{chain.launch}, {chain.target}: {error}")
    return cells, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.signals.kill_matrix", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launches", nargs="+", choices=LAUNCHES, default=list(LAUNCHES))
    parser.add_argument("--targets", nargs="+", help=f"rank 0, launcher, ..., {OUTPUT}; all")
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS, help="for processes")
    parser.add_argument("--at-once", type=int, default=2, help="runs; they wait most of the time")
    parser.add_argument("--record", action="store_true", help=f"keep what was seen in {RESULTS.name}")
    given = parser.parse_args()
    chains = [
        Chain(name, target, OUTPUT_COLUMNS if target == OUTPUT else given.signals)
        for name in given.launches
        for target in ("rank 0", "rank 1", *LAUNCHES[name].above, OUTPUT)
        if not given.targets or target in given.targets
    ]
    cells, wrong = play(given.folder, chains, given.at_once)
    if given.record:
        keep(cells)
    wrong += differences(cells)
    print("\n".join(wrong) or f"{len(cells)} cells, as promised")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
