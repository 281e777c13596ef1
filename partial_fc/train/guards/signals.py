"""Signals during training: SIGTERM and SIGUSR1, of a scheduler; SIGHUP, of a closed terminal; Ctrl-C.

The step is finished, a checkpoint written, and all ranks end with EXIT_PREEMPTED, "start me again", or after Ctrl-C
with EXIT_INTERRUPTED. Only some ranks may get the signal; the step vote informs the others.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import torch

from partial_fc import output
from partial_fc.checkpoint import Saver
from partial_fc.comm import CollectiveError, Work, World

EXIT_PREEMPTED = 75  # stopped with a checkpoint: start it again (EX_TEMPFAIL of sysexits.h)
EXIT_INTERRUPTED = 130  # the same by Ctrl-C: not to be started again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
# Further signals within so many seconds belong to the first: launchers pass on one that the process has also got.
TOGETHER_S = 1.0
_LAST_WORDS_S = 0.5


class StopSignals:
    """Records signals instead of ending; a context manager around training, which restores the handlers at its end.

    A second signal ends the process at once, as without this class. It works in the main thread only.
    """

    def __init__(
        self, rank: int = 0, newest: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.monotonic
    ):
        """newest: finds the last complete checkpoint, for the last message."""
        self._rank, self._newest = rank, newest
        self._clock = clock
        self._before: dict[int, Any] = {}
        self._first_at = 0.0
        self.received: signal.Signals | None = None
        self.all_listen = False  # all ranks are in such a block

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Ignored signals stay ignored: nohup ignores SIGHUP, a shell's background job SIGINT.
            for number in (n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN):
                self._before[number] = signal.signal(number, self._note)
        return self

    @property
    def status(self) -> int:
        """Returns the exit status of the run; 0: no signal."""
        if self.received is None:
            return 0
        return EXIT_INTERRUPTED if self.received == signal.SIGINT else EXIT_PREEMPTED

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._restore()
        if self.received and not self.all_listen and isinstance(error, CollectiveError):
            signal.raise_signal(self.received)  # it has ended another rank, which did not listen yet

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None: set outside of Python, which cannot set it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            self._first_at = self._clock()
            self._say("finishing this step, then a checkpoint; a second signal ends at once")
        elif self._clock() - self._first_at > TOGETHER_S:
            self._restore()
            if signal.getsignal(number) is signal.default_int_handler:
                # KeyboardInterrupt would wait for the checkpoint that is being written.
                signal.signal(number, signal.SIG_DFL)
            with contextlib.suppress(OSError, ValueError):
                self._say(f"second signal, ending at once; newest complete checkpoint: {self._newest() or 'none'}")
            output.drain(_LAST_WORDS_S)
            os.kill(os.getpid(), number)

    def _say(self, words: str) -> None:
        # Not through `logging`: the signal may have interrupted it while it holds its lock. Nor by os.write, which
        # would block on a terminal that nobody reads, and so delay the checkpoint.
        name = self.received.name if self.received else ""
        output.write(2, f"rank {self._rank}: {name}: {words}\n".encode())


@dataclass(frozen=True)
class Votes:
    """The result of a vote, equal on all ranks. stop: the exit status if any rank wants to stop, else 0; and whether
    any is busy with a checkpoint, failed to write it, or has lost its folder to another run."""

    stop: int
    busy: bool
    failed: bool
    lost: bool = False


class StepVote:
    """A vote from start(), where a step begins, to result(), where it ends: the step's other collectives imply that
    every rank has voted by then, so result() does not wait."""

    def __init__(self, world: World):
        self._world = world
        self._pending: Work | None = None

    def start(self, stop: int, saver: Saver) -> None:
        votes = torch.tensor([stop, saver.busy, saver.failed, saver.lost is not None], dtype=torch.int32)
        self._pending = self._world.start_all_reduce(votes, "max", name="train/vote")

    def result(self) -> Votes:
        assert self._pending is not None, "start() comes first"
        votes, self._pending = self._pending.wait(), None
        stop, *others = votes.tolist()
        return Votes(stop, *map(bool, others))
