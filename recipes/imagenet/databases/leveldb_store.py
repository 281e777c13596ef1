"""LevelDB as a store of records, opened through a shadow per process.

LevelDB has no positions, only sorted keys. They are listed in one pass, which reads the whole database, since keys and
values share blocks; the list is kept in the user's cache.
"""

import fcntl
import hashlib
import importlib
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partial_fc import terminal
from partial_fc.data.sample import BadRecord
from partial_fc.files import in_cache
from partial_fc.findings import counted

from .keys import KeyList
from .leveldb_manifest import Manifest, read_manifest

_PREFIX = "partial-fc-leveldb-"
_OWNER = "partial-fc.owner"  # locked while its process lives
_MARGIN = 64 * 2**20  # for LevelDB's own small files and one running compaction

_log = logging.getLogger(__name__)


class Shadow:
    """A folder through which a process opens a LevelDB without changing it.

    Opening a LevelDB writes: a new MANIFEST, tables from its logs, and compactions, which may rewrite all of it. The
    shadow holds copies of MANIFEST and CURRENT and links to the listed tables and logs. It links nothing else: the
    numbers of tables left over from a crash or a normal close are used again, and LevelDB would overwrite the originals
    through the links.

    It lies in `place` (default: the temporary folder). folder: what to open. manifest: the original's. num_shadows:
    of this database that must fit into the place; 0: another process has checked. Raises ValueError if the original is
    damaged or space is too small, OSError if the place is not writable."""

    def __init__(self, original: Path, place: Path | None = None, num_shadows: int = 1):
        original = original.resolve()
        self.manifest = read_manifest(original)
        self._place = place or Path(tempfile.gettempdir())
        if not self._place.is_dir():
            raise ValueError(f"{self._place}, the place for the shadow of {original}, is not a folder")
        _remove_stale(self._place)
        if num_shadows:
            _check_room(original, self.manifest, self._place, num_shadows)
        new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=self._place))
        # Locked before it gets a name that other processes search for.
        self._owner = os.open(new / _OWNER, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        self.folder = self._place / new.name[1:]
        for file in (*(table.path for table in self.manifest.tables), *self.manifest.logs):
            (new / file.name).symlink_to(file)
        for file in (self.manifest.path, original / "CURRENT"):
            shutil.copyfile(file, new / file.name)
        new.rename(self.folder)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._owner)


def _check_room(original: Path, manifest: Manifest, place: Path, num_shadows: int) -> None:
    # A database in key order needs no rewriting; overlapping tables may each be written once or twice before the old
    # one is deleted: 28 to 53 MiB for one of 34 MiB.
    logs = sum(log.stat().st_size for log in manifest.logs)
    needed = num_shadows * (int(1.5 * manifest.overlapping_bytes) + 2 * logs + _MARGIN)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise ValueError(
            f"{place} has {free / 2**30:.1f} GiB free; reading {original} may write {needed / 2**30:.1f} GiB there "
            "(LevelDB sorts a database that was not written in key order). Give a folder on a larger disk "
            f"(--leveldb-shadow), or convert it once: `partial-fc data lmdb {original} OUT`"
        )
    if manifest.overlapping_bytes:
        _log.warning(
            "%s was not written in key order: LevelDB sorts %.2f GiB of it again in %s at every start; `partial-fc "
            "data lmdb` sorts it once",
            original, manifest.overlapping_bytes / 2**30, place,
        )  # fmt: skip


def _remove_stale(place: Path) -> None:
    """Removes shadows whose process ended without removing them."""
    removed = 0
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.geteuid():
                continue
            owner = os.open(folder / _OWNER, os.O_RDWR)
        except FileNotFoundError:  # its process is removing it
            continue
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed += 1
        except BlockingIOError:
            pass
        finally:
            os.close(owner)
    if removed:
        _log.info("%s: removed %s of processes that have ended", place, counted(removed, "shadow"))


_BAR_EVERY = 4096


def import_plyvel(what: str) -> Any:
    """Imports plyvel. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module("plyvel")
    except ImportError:
        raise ValueError(
            f"{what}, which needs the package plyvel: `pip install plyvel==1.5.1`. It has no wheel for Python 3.13: "
            "there it needs a compiler and libleveldb-dev. Or make an LMDB of the database on a machine with an older "
            "Python: `partial-fc data lmdb`"
        ) from None


class LevelDbStore:
    """A LevelDB as a store. num_shadows: as in Shadow. Raises ValueError for a damaged database, and without plyvel."""

    kind = "LevelDB"

    def __init__(self, path: Path, shadow_place: Path | None = None, num_shadows: int = 1):
        plyvel = import_plyvel(f"{path} is a LevelDB")
        self.path = path
        self._error = plyvel.Error
        shadow = Shadow(path, shadow_place, num_shadows)
        try:
            self._database = plyvel.DB(str(shadow.folder), create_if_missing=False)
        except plyvel.Error as error:
            shadow.remove()
            raise ValueError(f"{path} cannot be opened as a LevelDB: {error}") from error
        self.close = weakref.finalize(self, _close, self._database, shadow)
        self._keys = self._listed(shadow.manifest)

    def __len__(self) -> int:
        return len(self._keys)

    def item(self, index: int) -> tuple[bytes, bytes]:
        """Returns (key, value) of the index-th record in key order."""
        key = self._keys[index]
        try:
            value = self._database.get(key, verify_checksums=True, fill_cache=False)
        except self._error as error:
            raise BadRecord(f"{self.path}, record {index} (key {key!r}): {error}") from None
        if value is None:
            raise ValueError(f"{self.path}: key {key!r} of the key list is not there; the database is damaged")
        return key, value

    def _listed(self, manifest: Manifest) -> KeyList:
        """Returns the keys, from the cache if the same database was listed before."""
        kept = _cache_file(self.path, manifest)
        keys = KeyList.load(kept)
        if keys is None:
            _log.info(
                "%s: listing its keys, which reads all %.2f GiB once; the list is kept in %s. An LMDB needs neither "
                "a list nor a shadow: `partial-fc data lmdb %s OUT`",
                self.path, manifest.num_bytes / 2**30, kept, self.path,
            )  # fmt: skip
            try:
                keys = KeyList.collect(self._all_keys(manifest.num_bytes))
            except self._error as error:
                raise ValueError(f"{self.path} is damaged: {error}") from error
            try:
                keys.save(kept)
            except OSError as error:
                _log.warning("%s cannot be written (%s): the next start lists the keys again", kept, error.strerror)
        return keys

    def _all_keys(self, num_bytes: int) -> Iterator[bytes]:
        # The size of a key range is only approximate.
        with (
            terminal.bar(total=num_bytes, unit="B", unit_scale=True, desc=f"keys of {self.path.name}") as bar,
            self._database.iterator(include_value=False, verify_checksums=True, fill_cache=False) as iterator,
        ):
            for number, key in enumerate(iterator):
                yield key
                if number % _BAR_EVERY == 0:
                    bar.update(self._database.approximate_size(b"", key) - bar.n)


def _close(database: Any, shadow: Shadow) -> None:
    database.close()  # waits for a running compaction
    shadow.remove()


def _cache_file(path: Path, manifest: Manifest) -> Path:
    """Returns the file of the key list, named by the database and its state."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(path)) + manifest.path.read_bytes())
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in (manifest.path, *manifest.logs)]
    digest.update(repr(state).encode())
    return in_cache("leveldb", f"{digest.hexdigest()[:16]}.npz")
