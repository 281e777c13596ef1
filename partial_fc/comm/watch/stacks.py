"""Where this process is in its Python code, and the last words of one that is about to end: nothing may keep it from
ending."""

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

_log = logging.getLogger("partial_fc")
_SAYS_NOTHING = (
    "/partial_fc/comm/",
    "/horovod/",
    "/torch/distributed/",
)  # code that only leads to a collective


def stacks(without: str) -> str:
    """Where each thread of this process is, the main one first; not of threads of that name."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = [main, *(t for t in threading.enumerate() if t is not main and t.name != without)]
    parts = [
        f"thread {t.name}\n{''.join(traceback.format_stack(frames[t.ident]))}" for t in threads if t.ident in frames
    ]
    return "Python stacks\n" + "".join(parts)


def code_of_main_thread() -> str:
    """The innermost lines, without those that only lead to a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < 3:
        path = frame.f_code.co_filename
        if not any(part in path for part in _SAYS_NOTHING):
            lines.append(f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return ", called from ".join(lines) or "no Python code"


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
