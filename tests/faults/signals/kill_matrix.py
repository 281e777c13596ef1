"""Sends every signal to every process of every launcher's job, and starts the same command again:

    python -m tests.faults.signals.kill_matrix FOLDER          all cells; compares with docs/reliability.md

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.ranks import complete
from tests.faults.signals.kill_table import Cell, differences
from tests.faults.signals.launches import EVERY, LAUNCHES, Started, set_pace
from tests.running import same_tensors, steps_done

SIGNALS = ("STOP", "KILL", "TERM", "USR1", "HUP", "INT")  # STOP, which should end nothing, first
STOPPED_S = 30.0
GONE_S = 10.0  # after a signal nothing may be left, unless the run goes on
NUM_STEPS = 600
_END_S = 900.0  # of all steps, on a machine that has much else to do
_FLAGS = ["--checkpoint-every", str(EVERY), "--max-steps", str(NUM_STEPS)]
_PACE_S = 0.2
_PACE_STOPPED_S = 1.0  # others than a stopped one train on


@dataclass(frozen=True)
class Chain:
    """One run, and the signals that one of its processes gets."""

    launch: str
    target: str
    signals: Sequence[str] = SIGNALS

    def play(self, folder: Path, whole: Path | None, pace_s: float = _PACE_S) -> list[Cell]:
        """whole: models_root of a run that was not disturbed; none: what follows on the last signal is not looked at.
        AssertionError: it does not go on, or its end is another one."""
        cells: list[Cell] = []
        set_pace(folder, pace_s)
        job: Started | None = None
        try:
            for name in self.signals:
                job = self._trains(folder, job, name)
                cells.append(_cell(job, self, name))
                print(json.dumps(asdict(cells[-1])), flush=True)
            if whole is None:
                return cells
            set_pace(folder, 0)
            job = self._trains(folder, job)
        finally:
            if job:
                job.kill()
        check_equal(whole, folder / "run")
        return cells

    def _trains(self, folder: Path, job: Started | None, name: str = "") -> Started:
        """The job, started again where it has ended: from the newest checkpoint. It trains; without a name of a next
        signal it has trained to its end."""
        newest = None
        if not job or job.process.poll() is not None:
            newest = complete(job.root)[-1] if job else None
            job = Started(self.launch, folder, _FLAGS)
        if name:
            job.wait_until_it_trains()
        else:
            assert job.process.wait(_END_S) == 0, job.printed[-3000:]
        assert not newest or f"resumed from {newest}" in (job.root / "training.log").read_text(), job.printed[-3000:]
        return job


def _cell(job: Started, chain: Chain, name: str) -> Cell:
    """What becomes of the run when the target gets the signal."""
    _between_checkpoints(job)
    before = steps_done(job.root)
    begin = time.monotonic()
    target = job.pid_of(chain.target)
    os.kill(target, getattr(signal, f"SIG{name}"))
    if name == "STOP":
        set_pace(job.folder, _PACE_STOPPED_S)
        time.sleep(STOPPED_S)
        set_pace(job.folder, _PACE_S)
        if Path(f"/proc/{target}").exists():
            os.kill(target, signal.SIGCONT)
        begin = time.monotonic()
    while (left := job.left()) and time.monotonic() < begin + GONE_S:
        if name == "STOP" and steps_done(job.root) > before + 5:
            break
        time.sleep(0.05)
    if left and job.process.poll() is None and _goes_on(job):
        return Cell(chain.launch, chain.target, name, "goes on", None, 0)
    status = None if job.process.pid in left else job.process.wait()
    ends = "left over" if left else "saved" if _has_saved(job.root) else "ends"
    job.kill()
    as_a_shell_has_it = status if status is None or status >= 0 else 128 - status
    return Cell(chain.launch, chain.target, name, ends, as_a_shell_has_it, len(left))


def _between_checkpoints(job: Started) -> None:
    """Returns in the middle between two checkpoints."""
    while not (steps_done(job.root) % EVERY in range(5, 10) and complete(job.root)):
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
    parser.add_argument("--targets", nargs="+", help="rank 0, launcher, ...; all")
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS)
    parser.add_argument("--at-once", type=int, default=2, help="runs; they wait most of the time")
    given = parser.parse_args()
    chains = [
        Chain(name, target, given.signals)
        for name in given.launches
        for target in ("rank 0", "rank 1", *LAUNCHES[name].above)
        if not given.targets or target in given.targets
    ]
    cells, wrong = play(given.folder, chains, given.at_once)
    wrong += differences(cells)
    print("\n".join(wrong) or f"{len(cells)} cells, as promised")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
