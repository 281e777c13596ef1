"""LMDB as a store of records. Any number of processes may read one, each with its own environment: open it after a
fork."""

import weakref
from pathlib import Path

import lmdb

from partial_fc.file_kind import it_is


class LmdbStore:
    """The records of an LMDB, 0 to len - 1 in the order of its keys. `path`: a folder with data.mdb, or such a file.
    leveldb: the LevelDB that it is a copy of, for messages. Lists the keys at the start, without reading values. Writes
    and locks nothing, so the folder may be read-only; detects concurrent writers. Several threads may read at once.
    Raises ValueError for a path that is no LMDB or is cut short."""

    def __init__(self, path: Path, leveldb: Path | None = None):
        self._opened = path, leveldb
        self.kind, self.path = ("LevelDB", leveldb) if leveldb else ("LMDB", path)
        file = (path / "data.mdb" if path.is_dir() else path).resolve()
        _environments[file] = self._environment = _environments.get(file) or _open(file)
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            self._version = transaction.id()
            self._keys = list(cursor.iternext(keys=True, values=False))

    def __reduce__(self) -> tuple[type["LmdbStore"], tuple[Path, Path | None]]:
        return LmdbStore, self._opened

    def __len__(self) -> int:
        return len(self._keys)

    def item(self, index: int) -> tuple[bytes, bytes]:
        """Returns (key, value) of the index-th record in key order."""
        key = self._keys[index]
        with self._environment.begin() as transaction:
            value = transaction.get(key) if transaction.id() == self._version else None
            if value is None:
                raise ValueError(
                    f"{self.path} was written to after it was opened; start again when the writer has finished"
                )
            return key, value


# LMDB allows one environment per file and process; stores share it.
_environments: weakref.WeakValueDictionary[Path, lmdb.Environment] = weakref.WeakValueDictionary()


def _open(file: Path) -> lmdb.Environment:
    try:
        environment = lmdb.open(str(file), subdir=False, readonly=True, create=False, lock=False, readahead=False)
        last_page, page_bytes = environment.info()["last_pgno"], environment.stat()["psize"]
    except lmdb.Error as error:
        raise ValueError(f"{file} cannot be opened as an LMDB: {error}{it_is(file)}") from error
    needed, size = (last_page + 1) * page_bytes, file.stat().st_size
    if size < needed:  # reading past the end would kill the process with SIGBUS
        environment.close()
        raise ValueError(f"{file} has {size} bytes, its pages need {needed}: it is cut short; copy it again")
    return environment
