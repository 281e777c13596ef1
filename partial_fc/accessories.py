"""What a run can do without: pictures, dashboards, curves, reports, statistics, bars, helper threads. None ends it."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger("partial_fc")
_NO_THREAD = "can't start new thread"  # the RuntimeError of threading
_left_out: dict[str, float] = {}  # what has failed -> when it is tried again, by time.monotonic()


def begin_anew() -> None:
    """Tries all accessories again: another run of this process begins."""
    _left_out.clear()


def spare(what: str, do: Callable[..., T], *args: Any, again_s: float = 0.0) -> T | None:
    """Returns do(*args). If that raises anything but an interruption by the user, one line of the log says so, and
    `what` is left out for the rest of the run: None. After an error of the system (a full disk, a refused thread) it is
    left out for again_s only. What hangs is not noticed here: it is a thread's work, or the hang report names it."""
    if time.monotonic() < _left_out.get(what, -math.inf):
        return None
    try:
        return do(*args)
    except (Exception, SystemExit) as error:
        passes = (isinstance(error, OSError) or _NO_THREAD in str(error)) and again_s < math.inf
        _left_out[what] = time.monotonic() + again_s if passes else math.inf
        _log.warning(f"{what}: left out{'' if passes else ' from now on'} ({_why(error)}); that alone ends no run")
        return None


def _why(error: BaseException) -> str:
    """Describes an error of any library in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200].rstrip(": ")


# ---- threads


class Foreground(Executor):
    """Does the work where it is handed in."""

    def submit(self, do: Callable[..., Any], /, *args: Any, **named: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(do(*args, **named))
        except Exception as error:
            done.set_exception(error)
        return done


def threads(count: int, name: str) -> Executor:
    """Returns a pool whose threads run already. If the system refuses them (pids.max of a container, RLIMIT_NPROC, the
    address space), it has fewer, and without any the work is done in the foreground, with a line in the log."""
    pool, begin = ThreadPoolExecutor(count, thread_name_prefix=name), threading.Event()
    try:
        for _ in range(count):
            pool.submit(begin.wait)
        return pool
    except (RuntimeError, MemoryError) as error:
        why = _why(error)
    finally:
        begin.set()
    pool.shutdown()
    if count > 1:
        return threads(count // 2, name)
    _log.warning(f"no thread for {name!r} ({why}): its work is done in the foreground, which takes longer")
    return Foreground()


# ---- matplotlib


def import_matplotlib() -> Any:
    """Imports matplotlib with its figures, which need no backend, no display and no pyplot; 0.4 s, and most processes
    draw nothing. Hides MPLBACKEND meanwhile: with that of a notebook (module://matplotlib_inline.backend_inline) other
    processes cannot import matplotlib."""
    hidden = os.environ.pop("MPLBACKEND", None)
    try:
        import matplotlib.figure
    finally:
        if hidden is not None:
            os.environ["MPLBACKEND"] = hidden
    return matplotlib
