"""Reads a file under watch: what a reader may do with any bytes at all, and what is a fault of it.

A reader gives a value, or a ValueError, BadRecord or Damaged of ours that names the file, or an OSError. Everything
else is a fault: another exception, a warning, memory far beyond the file's size, seconds for a few bytes, code that
runs.
"""

import ast
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from partial_fc.checkpoint.read import Damaged
from partial_fc.data.sample import BadRecord, LabelOutOfRange

# Exactly these: JSONDecodeError, UnicodeDecodeError are ValueErrors without a file's name.
OURS = (ValueError, BadRecord, LabelOutOfRange, Damaged)
# What any file may cost, beside a microsecond and four bytes for each of its own: of processor time, and of memory.
SECONDS = 1.0
MEMORY = 64 << 20
_ROOM = 64 << 20  # of addresses without memory behind them, as threads' heaps are
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")
_RUNS_CODE = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen"}
_RUNS_CODE |= {
    "pty.spawn",
    "socket.connect",
    "socket.bind",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "code.__new__",
    "pickle.find_class",
}
_CHANGES_FILES = {"os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link", "os.symlink", "os.chmod", "os.chown"}
_CHANGES_FILES |= {"os.truncate", "os.utime", "os.setxattr", "shutil.rmtree", "shutil.copyfile", "shutil.move"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Fault(AssertionError):
    """Something that a reader must not do. `where`: the innermost line of ours, by which faults are told apart."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")
        self.where = where


class Watched(NamedTuple):
    """outcome: "value" or the kind of the error. seconds: of processor time. num_bytes: of memory."""

    outcome: str
    seconds: float
    num_bytes: int

    def cost(self, size: int) -> float:
        """The share of what a file of that size may cost."""
        return max(self.seconds / (SECONDS + 1e-6 * size), self.num_bytes / (MEMORY + 4 * size))


def read_watched(read: Callable[[Path], Any], folder: Path, size: int = 0, more_bytes: int | None = 0) -> Watched:
    """Calls read(folder), which may cost what `size` bytes are worth; more_bytes: of memory beside that, for libraries
    that ask for more (None: any). Raises Fault."""
    # A sanitizer takes several times the time, and keeps what was freed.
    may_take = None if more_bytes is None or SANITIZED else MEMORY + 4 * size + more_bytes
    most_seconds = (SECONDS + 1e-6 * size) * (10 if SANITIZED else 1)
    before, start = _reset_peak(), time.process_time()
    outcome = _without_warnings(read, folder, may_take, most_seconds)
    seconds, num_bytes = time.process_time() - start, _peak() - before
    if seconds > most_seconds:
        raise Fault(f"{seconds:.2f} s for {size} bytes ({outcome})", "all of it")
    if may_take is not None and num_bytes > may_take:
        raise Fault(f"{num_bytes >> 20} MiB of memory for {size} bytes ({outcome})", "all of it")
    return Watched(outcome, seconds, num_bytes)


def _reset_peak() -> int:
    """This process' memory now, in bytes; `_peak` counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def _without_warnings(read: Callable[[Path], Any], folder: Path, may_take: int | None, seconds: float) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        warnings.filterwarnings("ignore", message="Detected pickle protocol")
        outcome = _outcome(read, folder, may_take, seconds)
    if _forbidden:
        raise Fault(f"{_forbidden.pop()} (it runs code or touches other files)", "an audit event")
    return outcome


def _outcome(read: Callable[[Path], Any], folder: Path, may_take: int | None, seconds: float) -> str:
    try:
        with _time_limit(seconds), _memory_limit(may_take), _no_code(folder):
            read(folder)
    except OURS as error:
        if type(error) not in OURS:
            raise Fault(_told(error), _line(error)) from error
        if str(folder) not in str(error):
            raise Fault(f"{_told(error)}: names no file", _line(error)) from error
        if may_take is not None and _asked_for_memory(error):
            raise Fault(f"memory: {_told(error)}", _line(error)) from error
        return type(error).__name__
    except OSError as error:
        return type(error).__name__
    except Exception as error:
        raise Fault(_told(error), _line(error)) from error
    return "value"


def _asked_for_memory(error: BaseException | None) -> bool:
    """Did a library behind it ask for more than the limit?"""
    while error is not None:
        if isinstance(error, MemoryError) and _in_parser(error):
            return False
        if isinstance(error, MemoryError) or "alloc" in str(error) or "Insufficient memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _in_parser(error: BaseException) -> bool:
    """Python's parser says MemoryError also where its stack has an end, 6,000 calls deep."""
    return traceback.extract_tb(error.__traceback__)[-1].filename == ast.__file__


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _line(error: BaseException) -> str:
    """The innermost line of this project."""
    ours = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/partial_fc/" in f.filename or "/recipes/" in f.filename
    ]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "no line of ours"


class _TooLong(Exception):
    """Raised in the middle of a reader."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Ends a reader after so much processor time, so that other programs do not count."""

    def stop(*_: object) -> None:
        raise _TooLong(f"still reading after {seconds:.1f} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _memory_limit(may_take: int | None) -> Iterator[None]:
    """This process may map so many bytes more than now: what asks for more fails at once instead of taking it."""
    if may_take is None:
        yield
        return
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + may_take + _ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_watched: list[str] = []  # the folder whose files may be written, while a reader is at work
_forbidden: list[str] = []
_hooked: list[bool] = []


@contextmanager
def _no_code(folder: Path) -> Iterator[None]:
    """Notes what the interpreter itself reports (PEP 578): processes, imports, executed code, changed files."""
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked.append(True)
    _forbidden.clear()
    _watched.append(str(folder))
    try:
        yield
    finally:
        _watched.clear()


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watched and _is_forbidden(event, args):
        _forbidden.append(f"{event} {str(args[:1])[:200]}")


def _is_forbidden(event: str, args: tuple[Any, ...]) -> bool:
    match event:
        case "exec" | "marshal.loads":
            return not _importing()
        case "code.__new__":  # what Cython makes for the trace of an exception
            return not str(args[1]).startswith("av/")
        case "import":  # neither Python's own, as codecs are, nor of a library that is in use
            return args[0].partition(".")[0] not in {*sys.modules, *sys.stdlib_module_names}
        case "open" if not (isinstance(args[2], int) and args[2] & _WRITES):
            return False
    if event in _CHANGES_FILES or event == "open":
        return not (isinstance(args[0], (str, os.PathLike)) and os.fspath(args[0]).startswith(_watched[0]))
    return event in _RUNS_CODE


def _importing() -> bool:
    """Is the code that is to run the body of a module that some library imports late?"""
    frame = sys._getframe(3)
    while frame is not None and "importlib" not in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
