"""LevelDB: copied once to an LMDB in the user's cache, from which it is read.

LevelDB has no positions, writes wherever it is opened, and lets one process in at a time. An LMDB has the same keys in
the same order, for any number of processes.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from partial_fc import terminal
from partial_fc.errors import package
from partial_fc.files import in_cache

from .write import lmdb_writer

# Of a database's files, those that are not of its contents.
_ASIDE = ("LOCK", "LOG", "LOG.old")
_SPARE = 1.2  # factor on the required space, for LMDB's pages

_log = logging.getLogger("partial_fc")


def as_lmdb(path: Path) -> Path:
    """Returns the LMDB of a LevelDB, and makes it if there is none of its present state; meanwhile other processes wait
    here. Raises ValueError for a LevelDB that is damaged or open elsewhere, for too little space, and without plyvel.
    """
    path = path.resolve()
    folder = in_cache("leveldb", hashlib.sha256(os.fsencode(path)).hexdigest()[:16])
    state = folder / "state"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not state.exists() or state.read_text() != _state(path):
            shutil.rmtree(folder, ignore_errors=True)
            _copy(path, folder)
            state.write_text(_state(path))  # opening has changed it
    return folder


def _state(path: Path) -> str:
    stats = [(file.name, file.stat()) for file in sorted(path.iterdir()) if file.name not in _ASIDE]
    return "".join(f"{name} {stat.st_size} {stat.st_mtime_ns}\n" for name, stat in stats)


def _copy(path: Path, folder: Path) -> None:
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    free = shutil.disk_usage(folder.parent).free
    if free < _SPARE * num_bytes:
        raise ValueError(
            f"{folder.parent} has {free / 2**30:.1f} GiB free; the LMDB that is made there of {path} needs about "
            f"{_SPARE * num_bytes / 2**30:.1f} GiB. Set XDG_CACHE_HOME to a folder on a larger disk"
        )
    _log.info("%s is a LevelDB: it is copied once to an LMDB, %s, and read from there", path, folder)
    with lmdb_writer(folder) as put:
        for key, value in terminal.bar(_records(path), desc=f"copying {path.name}", unit=" records"):
            put(key, value)


def _records(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yields (key, value) in the order of the keys."""
    aside = "or make an LMDB of it where there is an older Python, by `partial-fc data lmdb`"
    plyvel = package("plyvel", f"{path} is a LevelDB ({aside}), which", "leveldb")
    try:
        with (
            contextlib.closing(plyvel.DB(str(path), create_if_missing=False, paranoid_checks=True)) as database,
            database.iterator(verify_checksums=True, fill_cache=False) as iterator,
        ):
            yield from iterator
    except plyvel.IOError as error:
        raise ValueError(f"{path} cannot be opened as a LevelDB: {error}. {_remedy(path, str(error))}") from error
    except plyvel.Error as error:
        raise ValueError(f"{path} is a damaged LevelDB: {error}; copy it again") from error


def _remedy(path: Path, said: str) -> str:
    """Returns what to do about an IOError of LevelDB's."""
    if not os.access(path, os.W_OK):
        return "LevelDB writes where it is opened: copy the folder to where you may write"
    if "lock " in said:
        return "LevelDB lets one process in at a time: end the one that has it open"
    return "Files of it are missing or cannot be read: copy it again"
