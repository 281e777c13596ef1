"""The lock that makes one run the owner of its folder: a record in it, which the run refreshes.

    owner-1.json    run, host, process, since when, a counter that its process increments every second

File locks may be missing on network folders; instead, of several processes that create a file, one succeeds. A record
is stale if its process has ended (seen on its own host) or its counter has not changed for ten seconds (seen from other
hosts, without comparing clocks). To steal the folder, a run creates the record with the next number, and then removes
the stale one. One rank refreshes the record; every rank reads it before it writes, marks or removes anything of a
checkpoint: a rank that was stopped or cut off finds the record of another run. A record that was removed, and not
replaced by another run's, is created again, so `rm -r` ends no run.
"""

import contextlib
import errno
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from partial_fc.errors import describe
from partial_fc.files import about, regular

_log = logging.getLogger("partial_fc")
_BEAT_S = 1.0
_STALE_S = 10.0
_POLL_S = 0.2
_WIDTH = 1024  # bytes of a record: rewritten in place, its length never changes


class InUse(ValueError):
    """Another run writes to the folder."""


class LostLock(ValueError):
    """Another run has taken the folder: nothing in it may be marked or removed."""


@dataclass(frozen=True)
class Record:
    """The record of a run."""

    run: str
    host: str
    process: int
    start: int  # of the process, in clock ticks since boot: process ids are reused
    machine: str  # the host, and the process-id namespace
    since: str
    folder: int  # its inode: a copy of the folder has another one; device numbers differ between mounts

    @classmethod
    def here(cls, run: str, folder: int) -> "Record":
        process, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(run, socket.gethostname(), process, _start_of(process) or 0, _machine(), since, folder)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


class Fence:
    """The record of a folder as the run's ranks know it: a rank that was cut off finds another one there."""

    lost: LostLock | None = None  # why the folder belongs to another run, if that was seen

    def __init__(self, root: Path, record: Record):
        self.root, self.record = root, record

    def check(self) -> Path:
        """Returns the record's path. Raises LostLock if another run's record is there, OSError if none is."""
        records = {record: path for path in _records(self.root) if (record := _read(path))}
        if self.record in records:
            return records[self.record]
        os.stat(self.root)  # a missing folder, with its whole disk, is not lost
        if records:
            raise LostLock(
                f"{self.root} no longer belongs to this run: its lock is held by {list(records)[-1]}. Was this "
                "process stopped, or its host cut off, for more than 10 seconds? Nothing is marked or removed there. "
                "Start again with another --models-root, or when the other run has ended"
            )
        return self._missing()

    def _missing(self) -> Path:
        """Raises OSError: the record is missing, and only the process that refreshes it may create it."""
        path = self.root / "owner-*.json"
        raise FileNotFoundError(errno.ENOENT, "the record of this run was removed", str(path))


class FolderLock(Fence):
    """This process's record in a folder, refreshed by a thread until `release`."""

    def __init__(self, root: Path, record: Record):
        super().__init__(root, record)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, name="owner", daemon=True).start()

    def release(self) -> None:
        """Frees the folder. A record that is not this process's stays."""
        with self._lock:  # a refresh that has begun ends: it would overwrite the next owner's record
            self._ended.set()
        try:
            with self._lock:
                for path in _records(self.root):
                    if _read(path) == self.record:
                        path.unlink()
        except OSError as error:
            _log.warning(f"{error.filename} stays: {describe(error)}. A run on another host will wait for 10 s")

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(_BEAT_S):
            with contextlib.suppress(OSError):  # `check` reports it before it has effects
                try:
                    path = self.check()
                except LostLock as error:
                    self.lost = error
                    return
                with self._lock:
                    if not self._ended.is_set():
                        _put(path, self.record, count := count + 1)  # a removed file is not created again

    def _missing(self) -> Path:
        """Creates the record again."""
        with self._lock:
            made = None if self._ended.is_set() or _records(self.root) else _create(self.root, self.record)
            if made and _records(self.root) != [made]:  # another run starts there: it removes its own, too, or stays
                made.unlink(missing_ok=True)
                made = None
            if made is None:
                return super()._missing()
        _log.warning(f"{made} was removed, and is created again: {self.root} still belongs to this run")
        return made


def acquire(root: Path, run: str) -> tuple[FolderLock, str]:
    """Returns (this process's record in root, notes for the user). Waits while records of other runs may be
    live. Raises InUse if one is, OSError if the folder is not writable."""
    mine = Record.here(run, root.stat().st_ino)
    while True:
        stale = {path: _when_stale(path) for path in _records(root)}
        made = _create(root, mine)
        # Numbers are reused after all records were removed: the content must be what was judged stale.
        others = [other for other in _records(root) if other != made]
        if made and all(other in stale and _read(other) == stale[other] for other in others):
            break
        if made:  # another process was as fast, or faster: the next look finds its record
            made.unlink(missing_ok=True)
            time.sleep(secrets.randbelow(1000) / 1000)
    # Only these: a newcomer creates a record, too, sees this one and removes its own.
    left = [str(stale[other] or "a run") for other in others]
    for other in others:
        other.unlink(missing_ok=True)
    ended = "which has ended" if all(one is None or _has_ended(one) for one in stale.values()) else "in another folder"
    note = f"{root} was locked by {', '.join(left)}, {ended}: lock taken over" if left else ""
    return FolderLock(root, mine), note


def _when_stale(path: Path) -> Record | None:
    """Waits until a record is stale, removed or unchanged for _STALE_S; returns it. Raises InUse if it is live."""
    record, first, since = None, _content(path), time.monotonic()
    while (content := _content(path)) is not None:
        record = _parsed(content)
        here = record is not None and record.machine == _machine()
        if record and here and (_has_ended(record) or record.folder != path.parent.stat().st_ino):
            break  # or this folder is a copy of the one that the record is of
        if record and (here or content != first):
            raise InUse(
                f"{path.parent} is in use by another run: {record}. Wait for its end, end it there (`kill "
                f"{record.process}`: it writes a checkpoint first), or give this run a folder of its own: "
                "--models-root NEW"
            )
        if time.monotonic() >= since + _STALE_S:
            break
        time.sleep(_POLL_S)
    return record


def _has_ended(record: Record) -> bool:
    """Returns whether the process of a record of this host has ended."""
    start = _start_of(record.process)
    if start is not None:
        return start != record.start
    try:
        os.kill(record.process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # another user's, if the host hides other users' processes
        return False
    return True  # a zombie


def _start_of(process: int) -> int | None:
    """Returns the process's start time; None if it does not exist."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


def _machine() -> str:
    """Returns what differs on other hosts, in other process-id namespaces and after a reboot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


# ---- files


def _records(root: Path) -> list[Path]:
    """Returns the records by rising number."""
    return sorted(filter(_number, root.glob("owner-*.json")), key=_number)


def _number(path: Path) -> int:
    digits = path.stem.removeprefix("owner-")
    return int(digits) if digits.isdecimal() else 0


def _create(root: Path, record: Record) -> Path | None:
    """Creates the record under the next number; returns None if another process was faster."""
    path = root / f"owner-{max(map(_number, _records(root)), default=0) + 1}.json"
    try:
        _put(path, record, 0, os.O_CREAT | os.O_EXCL)  # only one process can, over NFS too
    except FileExistsError:
        return None
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # a full disk
        raise
    return path


def _put(path: Path, record: Record, count: int, flags: int = 0) -> None:
    """Writes the record in place. flags: of open(2), to create it."""
    with about(path), open(path, "wb", opener=lambda name, _: os.open(name, os.O_WRONLY | flags, 0o644)) as file:
        file.write(_text(record, count))


def _text(record: Record, count: int) -> bytes:
    # The length is constant: a concurrent reader sees the old counter, the new one, or a mixture.
    return json.dumps({**asdict(record), "alive": f"{count:012}"}).ljust(_WIDTH - 1).encode() + b"\n"


def _content(path: Path) -> bytes | None:
    """Returns the file's content; None if it was removed."""
    try:
        with about(path), open(path, "rb", opener=regular) as file:
            return file.read(2 * _WIDTH)
    except FileNotFoundError:
        return None


def _read(path: Path) -> Record | None:
    return _parsed(_content(path) or b"")


def _parsed(content: bytes) -> Record | None:
    """Returns the record; None if it is invalid or being created."""
    try:
        values = json.loads(content)
        record = Record(**{field.name: values[field.name] for field in fields(Record)})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    right = all(type(getattr(record, field.name)) is field.type for field in fields(Record))
    return record if right and str(record).isprintable() and min(record.process, record.start) >= 0 else None
