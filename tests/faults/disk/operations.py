"""What a process asks of its disk, one operation after the other: logged, and made to fail where a test wants it.

disk_shim.c does it, which a process has from its start:

    python -m tests.faults.disk.enumeration ...              starts itself again with LD_PRELOAD (`under_the_shim`)
"""

import ctypes
import errno
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from partial_fc.files import replacing

CRASHED = 77
_SOURCE = Path(__file__).with_name("disk_shim.c")
_WHAT = {"": 0, "crash": 1, "fail": 2, "short": 3}
_HOW_LONG = {"once": 0, "from there on": 1, "from there on, all ranks": 2}
_RECORD = struct.Struct("<IhhiiqiIII")

# The kinds of operations.
OPEN, WRITE, TRUNCATE, SYNC, CLOSE = "o", "w", "t", "s", "c"
RENAME, UNLINK, MKDIR, RMDIR = "r", "u", "m", "d"
MAPPED = "M"
# Lines of the test's own: all ranks were here; from here on a checkpoint of this step is to be found, whatever happens.
MEETING, PROMISE = "B", "P"
NOTES = (MAPPED, MEETING, PROMISE)
CHANGES = (WRITE, TRUNCATE, RENAME, UNLINK, MKDIR, RMDIR)


@dataclass(frozen=True, slots=True)
class Operation:
    kind: str
    rank: int
    result: int  # or minus the error's number
    file: int  # the number of what was opened
    offset: int  # of a write, -1: where the file stands; of a truncation: the size
    flags: int
    path: str
    other: str
    data: bytes

    @property
    def made(self) -> bool:
        return self.result >= 0

    @property
    def changes(self) -> bool:
        return self.kind in CHANGES or (self.kind == OPEN and bool(self.flags & (os.O_CREAT | os.O_TRUNC)))


class Fault(NamedTuple):
    """What is to happen to a rank's operation of this number."""

    rank: int
    at: int
    what: str  # "crash", "fail", "short"
    error: int = 0
    how_long: str = "once"

    def __str__(self) -> str:
        error = f" ({errno.errorcode[self.error]} {self.how_long})" if self.error else ""
        return f"{self.what}{error} at operation {self.at} of rank {self.rank}"


def under_the_shim(build: Path) -> None:
    """Starts this process again with the shim, unless it has it. build: a folder for the compiled shim."""
    if hasattr(ctypes.CDLL(None), "disk_watch"):
        return
    os.environ["LD_PRELOAD"] = str(compiled(build))
    sys.stdout.flush()
    os.execv(sys.executable, sys.orig_argv)


def compiled(build: Path) -> Path:
    """The shim, in a folder."""
    library = build / "disk_shim.so"
    with replacing(library) as partial:
        command = ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", str(_SOURCE), "-ldl", "-pthread"]
        subprocess.run([*command, "-o", partial], check=True)
    return library


class Disk:
    """The files below a folder, as this process and those that it forks see them."""

    def __init__(self, below: Path):
        self.below = below
        self._shim = ctypes.CDLL(None)
        self._shim.disk_watch.restype = ctypes.c_void_p
        self._shim.disk_log_bytes.restype = ctypes.c_size_t
        self._shim.disk_struck_path.restype = ctypes.c_char_p
        self._log = self._shim.disk_watch(str(below).encode())
        assert self._log, "no memory for the log"
        self.begin()

    def rank(self, rank: int) -> None:
        """This thread is rank's; -1: nobody's, and unwatched."""
        self._shim.disk_rank(rank)

    def begin(self, fault: Fault | None = None) -> None:
        """Counts and log begin anew."""
        what, error, how_long = (fault.what, fault.error, fault.how_long) if fault else ("", 0, "once")
        rank, at = (fault.rank, fault.at) if fault else (-1, -1)
        self._shim.disk_begin(_WHAT[what], error, _HOW_LONG[how_long], rank, at)

    def heal(self) -> None:
        """Nothing fails any more; the log goes on."""
        self._shim.disk_heal()

    def note(self, kind: str, value: int = 0) -> None:
        self._shim.disk_note(ord(kind), value)

    @property
    def struck(self) -> str | None:
        """The path of the first operation that was made to fail."""
        return self._shim.disk_struck_path().decode() if self._shim.disk_struck() else None

    def log(self) -> list[Operation]:
        return list(self._operations(ctypes.string_at(self._log, self._shim.disk_log_bytes())))

    @staticmethod
    def _operations(log: bytes) -> Iterator[Operation]:
        at = 0
        while at < len(log):
            num_bytes, kind, rank, result, file, offset, flags, *lengths = _RECORD.unpack_from(log, at)
            begin, texts = at + _RECORD.size, []
            for length in lengths:
                texts.append(log[begin : begin + length])
                begin += length
            path, other, data = texts
            yield Operation(chr(kind), rank, result, file, offset, flags, path.decode(), other.decode(), data)
            at += num_bytes
