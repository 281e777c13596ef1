"""Output that never delays or ends the process that prints.

A terminal may be closed, the reader of a pipe may stall or be gone, the disk with the log may be full. Bytes for
descriptors 1 and 2 are therefore queued, up to a limit, and written by a thread; what fails is dropped and counted.
"""

import atexit
import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections import deque

_ROOM_BYTES = 1 << 20  # the most that may wait for a slow reader
_STALLED_S = 1.0  # without any progress: the reader is not merely slow
DRAIN_S = 5.0  # at the end, for a reader without progress


class _Writer:
    """The queue of this process, and the thread that empties it; one for both descriptors, to keep their order."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._dropped_bytes = 0
        self._written_at = 0.0  # the last piece, monotonic
        self._given_up = False  # a drain has timed out, and nothing was written since
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, descriptor: int, data: bytes) -> None:
        # A signal's handler may interrupt its thread while that holds the lock, so no call is inside a +=.
        num_bytes = len(data)
        with self._changed:
            if self._waiting_bytes + num_bytes > _ROOM_BYTES:
                self._dropped_bytes += num_bytes
                return
            self._queue.append((descriptor, data))
            self._waiting_bytes += num_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="output", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def busy(self) -> bool:
        """Returns whether much is queued for a reader who is only slow."""
        return self._waiting_bytes > _ROOM_BYTES // 2 and time.monotonic() < self._written_at + _STALLED_S

    def drain(self, timeout_s: float) -> None:
        """Returns when all is written, or nothing was for timeout_s; the next call after that does not wait."""
        with self._changed:
            while (waiting := self._waiting_bytes) and not self._given_up:
                self._changed.wait(timeout_s)
                self._given_up = self._waiting_bytes == waiting

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                descriptor, data = self._queue.popleft()
                dropped = self._dropped_bytes
            note = f"[{dropped:,} bytes of output could not be written here]\n".encode() if dropped else b""
            written = _write(descriptor, note + data)
            with self._changed:
                self._given_up = False
                self._written_at = time.monotonic()
                self._waiting_bytes -= len(data)
                if written >= len(note):
                    self._dropped_bytes -= dropped
                self._dropped_bytes += len(data) - max(0, written - len(note))
                self._changed.notify_all()


def _write(descriptor: int, data: bytes) -> int:
    """Returns the number of bytes written before the descriptor refused."""
    done = 0
    while done < len(data):
        try:
            done += os.write(descriptor, data[done:])
        except OSError:
            # EPIPE, EIO, ENOSPC cannot be reported. The next piece is tried again: space may be freed.
            break
    return done


_writer: _Writer | None = _Writer()


def _after_fork() -> None:
    """Makes a forked process write directly: it has no thread, and may end without notice (multiprocessing)."""
    global _writer
    _writer = None


os.register_at_fork(after_in_child=_after_fork)


def write(descriptor: int, data: bytes) -> None:
    """Queues the bytes for descriptor 1 or 2; never raises, never waits."""
    if _writer is None:
        _write(descriptor, data)
    elif data:
        _writer.write(descriptor, data)


def busy() -> bool:
    """Returns whether the reader is slow, and others' output is better not read now. False if it takes nothing."""
    return _writer is not None and _writer.busy


def drain(timeout_s: float = DRAIN_S) -> None:
    """Waits until all is written, at most timeout_s without progress. For use before os._exit."""
    if _writer is not None:
        _writer.drain(timeout_s)


class _Stream(io.RawIOBase):
    """A file object for `write`."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data) -> int:
        content = bytes(data)
        write(self._descriptor, content)
        return len(content)


def open_closed() -> None:
    """Opens /dev/null for descriptors 0, 1 and 2 that are closed, so that no checkpoint's file gets one of them."""
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115


def detach() -> None:
    """Routes sys.stdout and sys.stderr through `write`; characters that their encoding lacks become backslash escapes.

    Streams that were replaced (by a notebook, pytest) stay.
    """
    open_closed()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if getattr(stream, "name", None) in (f"<{name}>", descriptor):  # the interpreter's, or that of open_closed
            with contextlib.suppress(OSError):
                stream.flush()
            raw = _Stream(descriptor)
            made = io.TextIOWrapper(
                raw,
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=True,
                write_through=True,  # type: ignore[type-var]
            )
            setattr(sys, name, made)


atexit.register(drain)
