"""Printing that never delays or ends the process that prints.

A terminal may be closed, the reader of a pipe may stall or be gone, the disk with the log may be full. Bytes for
descriptors 1 and 2 are therefore queued, up to a limit, and a thread writes them; what cannot be written is dropped,
and counted where writing works again.
"""

import atexit
import contextlib
import io
import os
import signal
import sys
import threading
from collections import deque

_ROOM_BYTES = 1 << 20  # that may wait for a slow reader
DRAIN_S = 5.0  # at the end, for a reader who takes nothing any more


class _Writer:
    """The queue of this process, and the thread that empties it. One for both descriptors: their order is kept."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._dropped_bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, descriptor: int, data: bytes) -> None:
        with self._changed:
            if self._waiting_bytes + len(data) > _ROOM_BYTES:
                self._dropped_bytes += len(data)
                return
            self._queue.append((descriptor, data))
            self._waiting_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="output", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Returns when all is written, or nothing was for timeout_s."""
        with self._changed:
            while waiting := self._waiting_bytes:
                self._changed.wait(timeout_s)
                if self._waiting_bytes == waiting:
                    return

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                descriptor, data = self._queue.popleft()
                dropped = self._dropped_bytes
            note = f"[{dropped:,} bytes of output could not be written here]\n".encode() if dropped else b""
            written = _write(descriptor, note + data)
            with self._changed:
                self._waiting_bytes -= len(data)
                if written >= len(note):
                    self._dropped_bytes -= dropped
                self._dropped_bytes += len(data) - max(0, written - len(note))
                self._changed.notify_all()


def _write(descriptor: int, data: bytes) -> int:
    """Returns how many bytes were written before the descriptor refused."""
    done = 0
    while done < len(data):
        try:
            done += os.write(descriptor, data[done:])
        except OSError:
            # EPIPE, EIO, ENOSPC: there is nobody to tell. The next piece is tried again: room may come back.
            break
    return done


_writer: _Writer | None = _Writer()


def _after_fork() -> None:
    """A forked process has no thread, and may end without a word (multiprocessing): it writes at once."""
    global _writer
    _writer = None


os.register_at_fork(after_in_child=_after_fork)


def write(descriptor: int, data: bytes) -> None:
    """Has the bytes written to descriptor 1 or 2; never raises, never waits."""
    if _writer is None:
        _write(descriptor, data)
    elif data:
        _writer.write(descriptor, data)


def drain(timeout_s: float = DRAIN_S) -> None:
    """Waits until all is written, but not longer than timeout_s for a reader who takes nothing. Before os._exit."""
    if _writer is not None:
        _writer.drain(timeout_s)


class _Stream(io.RawIOBase):
    """A file that `write` writes to."""

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
    """Opens /dev/null where descriptor 0, 1 or 2 is closed, so that none becomes that of a checkpoint's file."""
    for descriptor, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115


def detach() -> None:
    """From here on sys.stdout and sys.stderr are written by `write`, and show what their encoding lacks as \\N escapes.

    Streams that somebody has replaced (a notebook, pytest) stay."""
    global _writer
    open_closed()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if _writer is None:
        _writer = _Writer()
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
