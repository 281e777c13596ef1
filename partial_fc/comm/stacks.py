"""Where this process is in its Python code, for reports of a collective that hangs."""

import sys
import threading
import traceback

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
