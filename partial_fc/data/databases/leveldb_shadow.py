"""A shadow folder through which a process opens a LevelDB without changing it.

Opening a LevelDB writes: a new MANIFEST, tables from its logs, and compactions, which may rewrite all of it. The shadow
holds copies of MANIFEST and CURRENT and links to the listed tables and logs. It links nothing else: the numbers of
tables left over from a crash or a normal close are used again, and LevelDB would overwrite the originals through the
links.
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
_OWNER = "partial-fc.owner"  # locked while its process lives
_MARGIN = 64 * 2**20  # for LevelDB's own small files and one running compaction

_log = logging.getLogger(__name__)


class Shadow:
    """A shadow in `place` (default: the temporary folder). folder: what to open. manifest: the original's. num_shadows:
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
