"""Python stacks of this process, and its last messages, which must not delay its end."""

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

THREAD_NAME = "comm-watch"  # of the watchdog's threads
_log = logging.getLogger("partial_fc")
# Files whose code only leads to a collective.
_COMMUNICATION_CODE = ("/partial_fc/comm/", "/horovod/", "/torch/distributed/")


def stacks() -> str:
    """Returns the Python stack of each thread but the watchdog's, the main one first."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = [main, *(t for t in threading.enumerate() if t is not main and t.name != THREAD_NAME)]
    parts = [
        f"thread {t.name}\n{''.join(traceback.format_stack(frames[t.ident]))}" for t in threads if t.ident in frames
    ]
    return "Python stacks\n" + "".join(parts)


def code_of_main_thread() -> str:
    """Returns the innermost lines of the main thread, without those that only lead to a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < 3:
        path = frame.f_code.co_filename
        if not any(part in path for part in _COMMUNICATION_CODE):
            lines.append(f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return ", called from ".join(lines) or "no Python code"


def emit(rank: int, text: str, on_stderr: bool = True) -> None:
    """Writes to stderr, bypassing Python's locks, and to this rank's log."""
    if on_stderr:
        _run_within(2.0, lambda: os.write(2, f"rank {rank}: {text}\n".encode()))
    for handler in _log.handlers:
        if not isinstance(handler, logging.FileHandler):
            continue  # a terminal, which stderr is
        record = _log.makeRecord(_log.name, logging.CRITICAL, __file__, 0, text, (), None)
        _run_within(2.0, partial(handler.handle, record))


def _run_within(seconds: float, act: Callable[[], Any]) -> None:
    """Calls `act`, and waits `seconds` at most: a full pipe or hanging file system must not delay the process's end."""
    thread = threading.Thread(target=act, name=THREAD_NAME, daemon=True)
    thread.start()
    thread.join(seconds)
