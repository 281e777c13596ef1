"""Last words of a process that is about to end, where nothing may keep it from ending."""

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

_log = logging.getLogger("partial_fc")


def say(rank: int, words: str, thread_name: str, on_stderr: bool = True) -> None:
    """On stderr, where no lock of Python's can hold it up, and in this rank's log."""
    if on_stderr:
        _within(2.0, lambda: os.write(2, f"rank {rank}: {words}\n".encode()), thread_name)
    for handler in _log.handlers:
        if not isinstance(handler, logging.FileHandler):
            continue  # a terminal, which stderr is
        record = _log.makeRecord(_log.name, logging.CRITICAL, __file__, 0, words, (), None)
        _within(2.0, partial(handler.handle, record), thread_name)


def _within(seconds: float, act: Callable[[], Any], thread_name: str) -> None:
    """Does not wait longer than that: a full pipe or a file system that hangs must not keep a process from ending."""
    thread = threading.Thread(target=act, name=thread_name, daemon=True)
    thread.start()
    thread.join(seconds)
