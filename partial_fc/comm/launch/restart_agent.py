"""The restart agent of a rank (`--restarts N`): a process that has imported all that training needs, forks the worker
that trains, and forks the next one if that fails, without a new start of Python.

Each rank has one, and agents do not communicate. If a worker is lost, its connections close, so the collectives of the
others fail and they end, too. Their agents fork new workers, which join as at the start and resume from the newest
checkpoint. (Under elastic horovodrun the others stay: the driver does not see the loss, and the new worker joins them
and gets the state from their memory.) A worker has the environment, flags and modules of the start. An agent has no
thread, GPU, folder or socket (only rank 0's first worker gets the listening socket).
"""

import ctypes
import itertools
import mmap
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from types import FrameType

from partial_fc import output
from partial_fc.comm.launch import spawn
from partial_fc.comm.launch.detect import LISTENING_SOCKET

NAME = "partial-fc keep"  # in ps; torture/victims.py relies on it
# Failures in a row without a step beyond the furthest one, after which the agent gives up.
MAX_WITHOUT_PROGRESS = 5
_FINAL = {0, 2, 75, 130}  # success, invalid command line, stopped with a checkpoint, Ctrl-C
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
_PR_SET_NAME = 15  # prctl(2)
_PAUSE_S = 1.0  # after the second failure in a row without a new step; then twice as long each time
_POLL_S = 0.1
_ORPHAN_GRACE_S = 600  # for the last checkpoint, if the launcher was killed

# Shared memory of an agent and its workers: the furthest step that a worker has done, and a handover of so many bytes.
_page: mmap.mmap | None = None
_HEAD = struct.Struct("qq")


def step_done(step: int) -> None:
    """Reports progress to the agent, if there is one."""
    if _page is not None and step > furthest_step():
        struct.pack_into("q", _page, 0, step)


def furthest_step() -> int:
    """Returns the furthest step that workers of this rank have done; 0: none, or no agent."""
    return _HEAD.unpack_from(_page)[0] if _page is not None else 0


def hand_over(text: bytes) -> None:
    """Leaves up to a kilobyte for the next worker, if there is an agent."""
    if _page is not None:
        _page[_HEAD.size : _HEAD.size + len(text)] = text
        struct.pack_into("q", _page, 8, len(text))


def handover() -> bytes:
    """Returns the newest handover of an earlier worker."""
    if _page is None:
        return b""
    return _page[_HEAD.size : _HEAD.size + _HEAD.unpack_from(_page)[1]]


def keep(restarts: int, rank: int, with_launcher: bool) -> int | None:
    """Makes this process a restart agent. Returns None in each worker, which then trains; in the agent, at the end, the
    exit status. In a worker it does nothing.

    restarts: the most restarts. with_launcher: the agent ends with its parent process. Call it after all imports, with
    nothing open.
    """
    global _page
    if _page is not None:
        return None
    _page = mmap.mmap(-1, mmap.PAGESIZE)
    return _RestartAgent(restarts, rank, with_launcher).run()


class _RestartAgent:
    def __init__(self, restarts: int, rank: int, with_launcher: bool):
        self._restarts = restarts
        self._rank = rank
        self._launcher = os.getppid()
        self._worker = 0
        self._asked = 0  # the first signal that came
        self._fruitless = 0  # failures in a row
        if with_launcher:
            spawn.end_with(self._launcher)

    def run(self) -> int | None:
        agent, name, handlers = os.getpid(), _name(), {number: signal.getsignal(number) for number in _PASSED_ON}
        _set_name(NAME)
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._pass_on)
        for restart in itertools.count():
            before = furthest_step()
            # A signal that arrives meanwhile is for the worker, too.
            signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
            if self._asked:  # while there was no worker
                return 128 + self._asked
            self._worker = os.fork()
            if not self._worker:
                output.queue_again()
                _set_name(name)
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
                spawn.stay_with_parent(agent)
                return None
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
            if listening := os.environ.pop(LISTENING_SOCKET, None):
                os.close(int(listening))
            code = os.waitstatus_to_exitcode(os.waitpid(self._worker, 0)[1])
            self._worker = 0
            if not self._may_restart(code, restart, before):
                return code if code >= 0 else 128 - code
        raise AssertionError("count() has no end")

    def _may_restart(self, code: int, restart: int, before: int) -> bool:
        """Returns whether to start another worker, after the delay. before: the furthest step when this one began."""
        if code in _FINAL or self._asked:
            return False
        furthest = furthest_step()
        self._fruitless = 0 if furthest > before else self._fruitless + 1
        if furthest == 0 and code > 0:
            return False  # a wrong flag or missing data, which the worker has reported
        if self._fruitless > MAX_WITHOUT_PROGRESS:
            self._say(code, f"no step beyond {furthest} in {self._fruitless} tries: it would fail again, no restart")
            return False
        if restart == self._restarts:
            self._say(code, f"after {restart} restart(s), as many as --restarts allows")
            return False
        pause_s = _PAUSE_S * 2 ** (self._fruitless - 2) if self._fruitless > 1 else 0.0
        when = f"in {pause_s:g} s" if pause_s else "now"
        self._say(code, f"restart {restart + 1} of at most {self._restarts} {when}; furthest step {furthest}")
        until = time.monotonic() + pause_s
        while time.monotonic() < until and not self._asked:
            time.sleep(_POLL_S)
        return not self._asked

    def _say(self, code: int, words: str) -> None:
        how = f"status {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        with suppress(OSError):  # a closed terminal
            print(f"rank {self._rank}: ended with {how}; {words}", file=sys.stderr, flush=True)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._asked = self._asked or number
        if self._worker:
            with suppress(ProcessLookupError):
                os.kill(self._worker, number)
        if os.getppid() != self._launcher:
            signal.alarm(_ORPHAN_GRACE_S)  # ends the agent, and so its worker, even if that hangs


def _name() -> str:
    with open("/proc/self/comm", encoding="utf-8") as file:
        return file.read().strip()


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
