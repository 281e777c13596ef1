"""Where a job's output goes, and what becomes of that place while the job trains.

Each has `words` (the command line that has its output go there), `streams` (for subprocess.Popen), `started` (the
command runs: what this process need not hold is closed), `strike` (what happens), `printed`, and `close`.
"""

import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_PIPE_BYTES = 4096  # as few as there may be


class File:
    """A regular file. Nothing happens to it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._file: IO[bytes] | None = None

    def words(self, words: Sequence[str]) -> list[str]:
        return list(words)

    def streams(self) -> dict[str, Any]:
        self._file = self.path.open("wb")
        return {"stdin": subprocess.DEVNULL, "stdout": self._file, "stderr": subprocess.STDOUT}

    def started(self) -> None:
        if self._file:
            self._file.close()

    def strike(self, process: subprocess.Popen, train: Callable[[], None]) -> None:
        """train: returns some steps later, in the middle between two checkpoints."""

    def printed(self) -> str:
        return self.path.read_text(errors="replace") if self.path.exists() else ""

    def close(self) -> None:
        pass


class Tee(File):
    """`COMMAND 2>&1 | tee FILE`, and Ctrl-C, which a terminal sends to both. The status is the command's."""

    def words(self, words: Sequence[str]) -> list[str]:
        # With a trap of its own the shell waits; its children do not inherit it.
        script = 'trap : INT; "${@:2}" 2>&1 | tee "$1"; exit ${PIPESTATUS[0]}'
        return ["bash", "-c", script, "bash", str(self.path), *words]

    def streams(self) -> dict[str, Any]:
        return {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    def strike(self, process: subprocess.Popen, train: Callable[[], None]) -> None:
        os.killpg(process.pid, signal.SIGINT)


class FullDisk(File):
    """A file on a disk that is full some time later. As root: a small tmpfs is mounted."""

    def __init__(self, folder: Path, name: str) -> None:
        self._disk = folder / f"disk-{name}"
        self._disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(self._disk)], check=True)
        super().__init__(self._disk, name)

    def strike(self, process: subprocess.Popen, train: Callable[[], None]) -> None:
        with suppress(OSError), open(self._disk / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def close(self) -> None:
        if os.path.ismount(self._disk):
            subprocess.run(["umount", "-l", str(self._disk)], check=True)


class _Read(File):
    """What a thread of this process reads and writes into a file, until it is to stop."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self._read_end, self._write_end = self._ends()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def _ends(self) -> tuple[int, int]:
        raise NotImplementedError

    def started(self) -> None:
        self._thread.start()

    def _copy(self) -> None:
        with self.path.open("wb", buffering=0) as file:
            while not self._stop.is_set():
                if select.select([self._read_end], [], [], 0.05)[0]:
                    with suppress(OSError):  # EIO: all that had the terminal open have ended
                        file.write(os.read(self._read_end, 1 << 16))

    def _stop_reading(self) -> None:
        self._stop.set()
        if self._thread.ident:
            self._thread.join()

    def close(self) -> None:
        self._stop_reading()
        for end in (self._read_end, self._write_end):
            with suppress(OSError):
                os.close(end)


class Stalled(_Read):
    """A pipe whose reader stalls; some time later SIGTERM to the command."""

    def _ends(self) -> tuple[int, int]:
        return os.pipe()

    def streams(self) -> dict[str, Any]:
        return {"stdin": subprocess.DEVNULL, "stdout": self._write_end, "stderr": subprocess.STDOUT}

    def strike(self, process: subprocess.Popen, train: Callable[[], None]) -> None:
        self._stop_reading()
        fill(self._write_end)
        train()
        process.terminate()


class Terminal(_Read):
    """A terminal of its own, which is closed."""

    def _ends(self) -> tuple[int, int]:
        return pty.openpty()

    def streams(self) -> dict[str, Any]:
        return {"stdin": self._write_end, "stdout": self._write_end, "stderr": self._write_end}

    def started(self) -> None:
        os.close(self._write_end)
        super().started()

    def strike(self, process: subprocess.Popen, train: Callable[[], None]) -> None:
        self._stop_reading()
        os.close(self._read_end)

    def close(self) -> None:
        self._stop_reading()
        with suppress(OSError):
            os.close(self._read_end)


def fill(pipe: int) -> None:
    """Writes into the pipe until nothing more fits. Who else has it open is not made non-blocking."""
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    end = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(end, b"-" * 64)
    os.close(end)


def take_terminal() -> None:
    """In the new process, a leader of its session: the terminal that is its standard input is its own."""
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


# By the name of the table's column.
OUTPUTS: dict[str, type[File]] = {"TEE": Tee, "PTY": Terminal, "STALL": Stalled, "FULL": FullDisk}
