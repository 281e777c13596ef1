"""The lock that makes one run the owner of its folder: a record in it, which the run keeps alive.

    owner-1.json    run, host, process, since when, a counter that its process moves on every second

No file locks, which network folders may not have: of several processes that make a file, one succeeds. A record is
stale where its process has ended (seen on its own host) or its counter has stood still for ten seconds (seen from
elsewhere: no two clocks are compared). Who steals the folder makes the record with the next number, and then removes
the stale one. One rank keeps the record; every rank reads it before it marks, writes or removes anything of a
checkpoint: one that was stopped or cut off finds that of another run there, or of a later world of its own.
A record that somebody has removed, and no run has replaced, is made anew: `rm -r` that makes room ends no run.
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
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from partial_fc.errors import describe
from partial_fc.files import about, regular
from partial_fc.this_host import identity

_log = logging.getLogger("partial_fc")
_BEAT_S = 1.0
_STALE_S = 10.0
_LOOK_S = 2.0  # a beat, and what a busy host takes for it
_POLL_S = 0.2
_WIDTH = 1024  # bytes of a record: rewritten in place, it is never longer or shorter than it was

Sightings = dict[Path, tuple[bytes | None, float]]
"""Record -> what stood there when this process first saw it, and when that was."""


class InUse(ValueError):
    """Another run writes to the folder."""


class LostLock(ValueError):
    """The folder is another run's now: nothing in it may be marked or removed any more."""


@dataclass(frozen=True)
class Record:
    """What a run says of itself."""

    run: str
    host: str
    process: int
    start: int  # of the process, in clock ticks since its host was: numbers of processes come again
    machine: str  # the host, and the space in which it numbers processes
    since: str
    world: int = 0  # where ranks come and go: how often this run has taken the record before

    @classmethod
    def here(cls, run: str) -> "Record":
        process, since = os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(run, socket.gethostname(), process, _start_of(process) or 0, _machine(), since)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


class Fence:
    """The record of a folder as the ranks of one world know it: who is cut off finds another one there."""

    lost: LostLock | None = None
    """Why the folder is not this run's any more, where somebody has seen that."""

    def __init__(self, root: Path, record: Record):
        self.root, self.record = root, record

    def check(self) -> None:
        """Raises LostLock where the folder has another record than this world's; OSError where it has none, or cannot
        be read."""
        self.find()

    def find(self) -> Path:
        """Where the record is; raises as `check`."""
        records = {record: path for path in _records(self.root) if (record := _read(path))}
        if self.record in records:
            return records[self.record]
        os.stat(self.root)  # a folder that is away, with its whole disk, is not lost
        if records:
            raise LostLock(
                f"{self.root} is not this run's any more: it is that of {list(records)[-1]}. Was this process stopped, "
                "or its host cut off, for more than 10 seconds? Nothing is marked or removed there; start again with "
                "another --models-root, or when the other run has ended"
            )
        return self._missing()

    def _missing(self) -> Path:
        """There is no record. Who does not keep it writes nothing until it is there again."""
        path = self.root / "owner-*.json"
        raise FileNotFoundError(errno.ENOENT, "the record of this run was removed", str(path))


class FolderLock(Fence):
    """This process's record in a folder, kept alive by a thread until `release`."""

    def __init__(self, root: Path, record: Record):
        super().__init__(root, record)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, name="owner", daemon=True).start()

    def stop(self) -> None:
        """The record stays; another process of this run keeps it from now on."""
        self._ended.set()

    def release(self) -> None:
        """The folder is free. A record that is not this process's stays."""
        self.stop()
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
            with contextlib.suppress(OSError):  # `check` says so before anything comes of it
                try:
                    path = self.find()
                except LostLock as error:
                    self.lost = error
                    return
                if not self._ended.is_set():
                    _rewrite(path, self.record, count := count + 1)

    def _missing(self) -> Path:
        """Makes the record anew."""
        with self._lock:
            made = None if self._ended.is_set() or _records(self.root) else _create(self.root, self.record)
            if made and _records(self.root) != [made]:  # another run begins there: it removes its own, too, or stays
                made.unlink(missing_ok=True)
                made = None
            if made is None:
                return super()._missing()
        _log.warning(f"{made} was removed, and is made anew: {self.root} is still this run's, which goes on")
        return made


def sightings(root: Path) -> Sightings:
    """The records that are in root now, for `acquire`: it need not wait as long then for those that stand still."""
    return {path: (_content(path), time.monotonic()) for path in _records(root)}


def acquire(root: Path, run: str, seen: Sightings | None = None) -> tuple[FolderLock, str]:
    """(this process's record in root, what to tell the user). A record of the same run becomes this process's. Waits
    for as long as records of other runs may be alive. Raises InUse where one is, OSError where the folder cannot be
    written to."""
    mine, seen = Record.here(run), seen or {}
    while True:
        stale = {}
        for path in _records(root):
            record = _read(path)
            if record and record.run == run:
                mine = replace(mine, world=record.world + 1)
                _rewrite(path, mine, 0)
                return FolderLock(root, mine), ""
            stale[path] = _when_stale(path, *seen.get(path, (_content(path), time.monotonic())), _STALE_S)
        made = _create(root, mine)
        # A number comes again where all were removed: what was judged has to be what stands there still.
        others = [other for other in _records(root) if other != made]
        if made and all(other in stale and _read(other) == stale[other] for other in others):
            break
        # Another one was as fast, or faster: it is there when we look again.
        seen = {}
        if made:
            made.unlink(missing_ok=True)
            time.sleep(secrets.randbelow(1000) / 1000)
    # Only these: who comes now makes a record, too, sees this one and removes its own.
    left = [str(stale[other] or "a run") for other in others]
    for other in others:
        other.unlink(missing_ok=True)
    return FolderLock(root, mine), f"{root} was that of {', '.join(left)}, which is gone: taken over" if left else ""


def check_free(roots: Iterable[Path]) -> None:
    """Raises InUse where another run is seen to live in one of these folders: at once on its own host, else within
    _LOOK_S. One that is not seen may yet be there: `acquire` knows. For the time before a run's ranks have met, when no
    record can be its own."""
    for path, (first, since) in {path: sight for root in roots for path, sight in sightings(root).items()}.items():
        _when_stale(path, first, since, _LOOK_S)


def _when_stale(path: Path, first: bytes | None, since: float, patience_s: float) -> Record | None:
    """Waits until a record is known to be stale, or gone, or has been what it was at first for patience_s. Returns what
    it says. Raises InUse where it lives."""
    record = None
    while (content := _content(path)) is not None:
        record = _parsed(content)
        here = record is not None and record.machine == _machine()
        if record and here and _has_ended(record):
            break
        if record and (here or content != first):
            raise InUse(
                f"{path.parent} is in use by another run: {record}. Wait for its end, end it there (`kill "
                f"{record.process}`: it writes a checkpoint first), or give this run a folder of its own: "
                "--models-root NEW"
            )
        if time.monotonic() >= since + patience_s:
            break
        time.sleep(_POLL_S)
    return record


def _has_ended(record: Record) -> bool:
    """Whether the process of a record of this host runs no more."""
    start = _start_of(record.process)
    if start is not None:
        return start != record.start
    try:
        os.kill(record.process, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # another user's, on a host that shows nobody others' processes
        return False
    return True  # it has ended, and nobody has asked how


def _start_of(process: int) -> int | None:
    """When it was started; None: there is none, or it has ended."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


def _machine() -> str:
    return f"{identity()} {os.readlink('/proc/self/ns/pid')}"


# ---- files


def _records(root: Path) -> list[Path]:
    """By rising number."""
    return sorted(filter(_number, root.glob("owner-*.json")), key=_number)


def _number(path: Path) -> int:
    digits = path.stem.removeprefix("owner-")
    return int(digits) if digits.isdecimal() else 0


def _create(root: Path, record: Record) -> Path | None:
    """The record under the next number; None: somebody else has just made it."""
    path = root / f"owner-{max(map(_number, _records(root)), default=0) + 1}.json"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)  # by one process alone, over NFS, too
    except FileExistsError:
        return None
    try:
        _put(path, descriptor, record, 0)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)  # a full disk
        raise
    return path


def _rewrite(path: Path, record: Record, count: int) -> None:
    """In place: where the file is gone it is not made again."""
    _put(path, os.open(path, os.O_WRONLY), record, count)


def _put(path: Path, descriptor: int, record: Record, count: int) -> None:
    text, done = _text(record, count), 0
    with about(path):
        try:
            while done < len(text):
                done += os.pwrite(descriptor, text[done:], done)
        finally:
            os.close(descriptor)


def _text(record: Record, count: int) -> bytes:
    # As many bytes each time: who reads while it is written sees the counter before or after, or some of both.
    return json.dumps({**asdict(record), "alive": f"{count:012}"}).ljust(_WIDTH - 1).encode() + b"\n"


def _content(path: Path) -> bytes | None:
    """None: the file is gone."""
    try:
        with about(path), open(path, "rb", opener=regular) as file:
            return file.read(2 * _WIDTH)
    except FileNotFoundError:
        return None


def _read(path: Path) -> Record | None:
    return _parsed(_content(path) or b"")


def _parsed(content: bytes) -> Record | None:
    """None: it is no record, or one that is just being made."""
    try:
        values = json.loads(content)
        record = Record(**{field.name: values[field.name] for field in fields(Record) if field.name in values})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    kinds = {field.name: int if field.type in (int, "int") else str for field in fields(Record)}
    right = all(type(getattr(record, name)) is kind for name, kind in kinds.items())
    numbers = (record.process, record.start, record.world)
    return record if right and str(record).isprintable() and all(0 <= n < 1 << 62 for n in numbers) else None
