"""Restarts (`--restarts N`): after which failures the supervisor starts its processes again, and how far they had come.

All processes of a host are started again, with the same command line; they join as at the start, and resume from the
newest checkpoint. Hosts do not communicate about it: if a process is lost, its connections close, so the collectives of
the others fail, and their supervisors start them again, too.
"""

import functools
import os
import struct
import time
from collections.abc import Collection

from partial_fc import output

# Failures in a row without a step beyond the furthest one, after which there is no restart.
MAX_WITHOUT_PROGRESS = 5
_FINAL = {0, 2, 75, 130}  # success, invalid command line, stopped with a checkpoint, Ctrl-C
_PAUSE_S = 1.0  # after the second failure in a row without a new step; then twice as long each time
_POLL_S = 0.1

# In the processes, the number of a file in memory that they share with the supervisor: the furthest step.
FURTHEST_STEP = "PARTIAL_FC_FURTHEST_STEP"
_STEP = struct.Struct("q")


@functools.cache
def _shared_file() -> int | None:
    number = os.environ.pop(FURTHEST_STEP, "")  # whatever this process starts has another file of that number
    return int(number) if number else None


def step_done(step: int) -> None:
    """Tells the supervisor how far this process has come, if it may restart it."""
    file = _shared_file()
    if file is not None and step > _read(file):
        os.pwrite(file, _STEP.pack(step), 0)


def furthest_step() -> int:
    """Returns the furthest step of this host's processes, before a restart, too; 0: none, or no --restarts."""
    file = _shared_file()
    return 0 if file is None else _read(file)


def _read(file: int) -> int:
    return _STEP.unpack(os.pread(file, _STEP.size, 0))[0]


class Restarts:
    """The restarts of a supervisor's processes. most: how many."""

    def __init__(self, most: int):
        self._most = most
        self._count = self._fruitless = self._furthest_before = 0
        self.file = os.memfd_create("furthest step")
        os.pwrite(self.file, _STEP.pack(0), 0)

    def allows(self, status: int, signals: Collection[int]) -> bool:
        """Returns whether to start the processes again, after a pause. status: of the one that failed first, as a shell
        has it. signals: those that arrive meanwhile, after which there is no restart."""
        furthest, before = _read(self.file), self._furthest_before
        if status in _FINAL or (furthest == 0 and status < 128):  # a wrong flag or missing data, which was reported
            return False
        self._furthest_before = furthest
        self._fruitless = 0 if furthest > before else self._fruitless + 1
        if self._fruitless > MAX_WITHOUT_PROGRESS:
            _say(f"no step beyond {furthest} in {self._fruitless} tries: it would fail again, no restart")
            return False
        if self._count == self._most:
            _say(f"failed after {self._count} restart(s), as many as --restarts allows")
            return False
        self._count += 1
        pause_s = _PAUSE_S * 2 ** (self._fruitless - 2) if self._fruitless > 1 else 0.0
        when = f"in {pause_s:g} s" if pause_s else "now"
        _say(f"restart {self._count} of at most {self._most} {when}; furthest step {furthest}")
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not signals:
            time.sleep(_POLL_S)
        return not signals


def _say(text: str) -> None:
    output.write(2, f"{text}\n".encode())
