"""LevelDB as a store of records, opened through a shadow per process.

LevelDB has no positions, only sorted keys. They are listed in one pass, which reads the whole database, since keys and
values share blocks; the list is kept in the user's cache.
"""

import hashlib
import importlib
import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from partial_fc import terminal
from partial_fc.data.databases.keys import KeyList
from partial_fc.data.databases.leveldb_manifest import Manifest
from partial_fc.data.databases.leveldb_shadow import Shadow
from partial_fc.data.sample import BadRecord
from partial_fc.files import in_cache

_BAR_EVERY = 4096

_log = logging.getLogger(__name__)


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
