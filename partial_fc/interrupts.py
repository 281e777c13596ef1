"""Ctrl-C while Python imports ends the process at once, by the signal: nothing has begun.

Python's own handler raises KeyboardInterrupt in whatever runs, and some of that drops it: torch's C code imports numpy
and takes any error for its absence. The process would go on, and with several the others have ended.
"""

import _frozen_importlib
import signal
import threading
from types import FrameType


def listen() -> None:
    """Makes Ctrl-C end imports, if it raises KeyboardInterrupt now, and lets it through if it is blocked: our launcher
    blocks it for Python's own start, where it would be a fatal error, status 1."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def handle(number: int, frame: FrameType | None) -> None:
    """Ends the process if the main thread imports; else raises KeyboardInterrupt."""
    at = frame
    while at is not None:
        if at.f_globals is vars(_frozen_importlib):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        at = at.f_back
    signal.default_int_handler(number, frame)
