"""Ctrl-C at the start of a run, before there is anything to close: in an import it ends the process, by the signal.

Python's own handler raises KeyboardInterrupt in whatever runs, and some of that drops it: torch's C code imports numpy
and takes any error for its absence. The process would go on, and wait for others that have ended.
"""

import _frozen_importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def listen() -> None:
    """Makes Ctrl-C end imports, unless it is ignored or another's, and lets it through: our launcher blocks it for the
    start of Python itself, where it would be a fatal error, status 1."""
    _replace(signal.default_int_handler, _end_import)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def always_raise() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt in imports, too."""
    _replace(_end_import, signal.default_int_handler)


def _replace(handler: Callable[..., Any], new: Callable[..., Any]) -> None:
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is handler:
        signal.signal(signal.SIGINT, new)


def _end_import(number: int, frame: FrameType | None) -> None:
    """Ends the process if the main thread imports; else raises KeyboardInterrupt."""
    at = frame
    while at is not None:
        if at.f_globals is vars(_frozen_importlib):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        at = at.f_back
    signal.default_int_handler(number, frame)
