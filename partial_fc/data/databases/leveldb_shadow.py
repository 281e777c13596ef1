"""A folder through which one process opens a LevelDB and that takes what opening it changes.

Opening a LevelDB writes: a new MANIFEST, tables from its logs, and compactions, which may rewrite all of it. The
shadow holds copies of MANIFEST and CURRENT and links to the tables and logs that MANIFEST lists. Nothing else is
linked: tables that a crash or a normal close left over have numbers that will be given out again, and through their
links LevelDB would write over the originals.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

from partial_fc.data.databases.leveldb_manifest import Manifest, read_manifest
from partial_fc.findings import counted

_PREFIX = "partial-fc-leveldb-"
_OWNER = "partial-fc.owner"  # locked as long as its process lives
_MARGIN = 64 * 2**20  # of a LevelDB's own small files and one compaction at work

_log = logging.getLogger(__name__)


class Shadow:
    """folder: what to open. manifest: the original's. Lies in `place`, by default the folder of temporary files.
    num_shadows: how many of this database the place must have room for; 0: another process has looked. Raises
    ValueError where the original is damaged or the place has too little room, OSError where it cannot be written."""

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
        # Locked before it has a name that others look for.
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
    # A key-ordered database is taken as it is; where tables overlap, each may be written once or twice before the old
    # one goes: 28 to 53 MiB for one of 34 MiB.
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
            "%s was not written in key order: LevelDB will sort %.2f GiB of it anew in %s, at every start; `partial-fc "
            "data lmdb` does so once",
            original, manifest.overlapping_bytes / 2**30, place,
        )  # fmt: skip


def _remove_stale(place: Path) -> None:
    """Shadows whose process has ended without removing them."""
    removed = 0
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.geteuid():
                continue
            owner = os.open(folder / _OWNER, os.O_RDWR)
        except FileNotFoundError:  # its process removes it at this moment
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
