"""SIGTERM and SIGUSR1 while training: the machine is wanted by somebody else, or the time is up; SIGHUP, where the
terminal is closed; Ctrl-C.

The step is finished, a checkpoint written, and all ranks end with EXIT_PREEMPTED, "start me again", or after Ctrl-C
with EXIT_INTERRUPTED. Only some of them may get the signal; the others are told in the step (step_vote.py).
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from partial_fc import output

EXIT_PREEMPTED = 75  # asked to stop, and saved: start it again (EX_TEMPFAIL of sysexits.h)
EXIT_INTERRUPTED = 130  # the same by Ctrl-C: nobody is to start it again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
# Within so many seconds further signals belong to the first: a launcher passes one on that the process has got as well.
TOGETHER_S = 1.0
_LAST_WORDS_S = 0.5


class StopSignals:
    """Notes the signals instead of ending; for `with`, around training. Afterwards they mean what they meant before.

    A second signal ends the process at once, as it would have ended without us. Handlers can only be set in Python's
    main thread: elsewhere nothing is changed, and nothing noted.
    """

    def __init__(
        self, rank: int = 0, newest: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.monotonic
    ):
        """newest: finds the last complete checkpoint, for the last words."""
        self._rank, self._newest = rank, newest
        self._clock = clock
        self._before: dict[int, Any] = {}
        self._first_at = 0.0
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # What is ignored stays so: nohup ignores SIGHUP, a shell's background job SIGINT.
            for number in (n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN):
                self._before[number] = signal.signal(number, self._note)
        return self

    @property
    def status(self) -> int:
        """What the run is to end with; 0: no signal has come."""
        if self.received is None:
            return 0
        return EXIT_INTERRUPTED if self.received == signal.SIGINT else EXIT_PREEMPTED

    def __exit__(self, *_error: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            # None: set by something that is not Python, which Python cannot set again.
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
                self._say(f"the second one, ending at once; {self._newest() or 'no complete checkpoint'} stands")
            output.drain(_LAST_WORDS_S)
            os.kill(os.getpid(), number)

    def _say(self, words: str) -> None:
        # Not through `logging`: the signal may have come while it holds its lock. Nor by os.write: a terminal that is
        # gone, or that nobody reads, keeps nobody from the checkpoint.
        name = self.received.name if self.received else ""
        output.write(2, f"rank {self._rank}: {name}: {words}\n".encode())
