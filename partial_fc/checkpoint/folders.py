"""The folders of checkpoints below a root: which are whole, which one to go on from, which may go."""

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

from partial_fc.checkpoint.files import write_json
from partial_fc.files import MANIFEST_BYTES, NO_SUCH_FILE, about, read_manifest, read_text, regular, sync_folder

MARKER = "COMPLETE"
MANIFEST = "manifest.json"
OLD_FORMAT = 3  # without checksums, running statistics of the ranks, and anything in the marker
# What is set aside is called step-N and one of these words; of a second one with a number.
DAMAGED, LEFT = "damaged", "left"
_ASIDE = re.compile(rf"step-\d+\.({DAMAGED}|{LEFT})(-\d+)?")
_log = logging.getLogger("partial_fc")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def all_steps(root: Path) -> list[Path]:
    """The folders of checkpoints below root, whole or not, by rising step. Those of other names (a copy,
    step-00000100.bak) are not ours. Raises OSError where the root cannot be looked into: Path.glob would find nothing
    there, and a run would begin anew."""
    try:
        folders = [root / name for name in os.listdir(root) if name.startswith("step-")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(filter(_is_ours, folders), key=step_of)


def complete(root: Path) -> list[Path]:
    """Those of `all_steps` that have their marker: they count, or are damaged (`healing.latest_valid` tells)."""
    return [folder for folder in all_steps(root) if (folder / MARKER).exists()]


def newest(root: Path) -> Path | None:
    """The complete checkpoint with the most steps below root."""
    return max(complete(root), key=step_of, default=None)


def is_step(folder: Path) -> bool:
    """Whether it is the folder of one checkpoint, whole or not, and no folder of such."""
    return (folder / MANIFEST).exists() or (folder / MARKER).exists()


def step_folder(folder: Path) -> Path:
    """The folder itself, or the newest complete checkpoint in it. Raises ValueError where there is none."""
    if is_step(folder):
        return folder
    for root in (folder, folder / "checkpoints"):
        newest_one = newest(root)
        if newest_one is not None:
            return newest_one
    raise ValueError(
        f"{folder} holds no complete checkpoint; expected a folder step-N with a file {MARKER}, or one of such"
    )


def steps_below(folder: Path) -> list[Path]:
    """The folders of checkpoints, whole or not, in a folder of such; by name."""
    for root in (folder, folder / "checkpoints"):
        steps = sorted(path for path in root.glob("step-*") if path.is_dir())
        if steps:
            return steps
    raise ValueError(f"{folder} holds no checkpoint; expected a folder step-N, or one with such folders")


def step_of(folder: Path) -> int:
    """The step that a folder's name says. Raises ValueError for another folder."""
    return int(folder.name.removeprefix("step-"))


def _is_ours(folder: Path) -> bool:
    return folder.name.removeprefix("step-").isdecimal()


def only_one_is_unreadable(folder: Path, bad: Path) -> bool:
    """Whether bad, which the disk does not read, is one file of a checkpoint whose other files can be read: their first
    bytes tell, since a disk that is away, or broken as a whole, gives none of any."""
    try:
        beside = [folder / name for name in os.listdir(folder) if name != bad.name]
        for path in beside:
            with about(path), open(path, "rb", opener=regular) as file:
                file.read(4096)
    except OSError:
        return False
    return bad.parent == folder and folder / MARKER in beside


def is_set_aside(folder: Path) -> bool:
    """Whether its name is one that `quarantine` gives."""
    return _ASIDE.fullmatch(folder.name) is not None


def quarantine(folder: Path, why: str) -> Path:
    """Gives a checkpoint a name that is not ours, so that it is neither gone on from nor removed; nothing in it
    changes. why: DAMAGED, or LEFT where a run goes back behind it. Returns the folder's new path. Raises OSError."""
    names = (f"{folder.name}.{why}{f'-{number}' if number > 1 else ''}" for number in count(1))
    aside = next(path for name in names if not os.path.lexists(path := folder.with_name(name)))
    folder.rename(aside)
    sync_folder(folder.parent)
    return aside


def mark(folder: Path, step: int, ranks: Iterable[int]) -> None:
    """Lets the folder count: all that these ranks have written there is on the disk."""
    sync_folder(folder)
    write_json({"step": step, "ranks": list(ranks)}, folder / MARKER)
    sync_folder(folder)
    sync_folder(folder.parent)


def unmark(folder: Path) -> None:
    """Lets the folder count no more. Where the marker is gone already, that need not be on the disk yet: the sync may
    be what failed."""
    if folder.exists():
        (folder / MARKER).unlink(missing_ok=True)
        sync_folder(folder)


def best(root: Path, last: int | None = None) -> Path | None:
    """The complete checkpoint with the highest score, of step `last` at most; the newest of equals. None where none was
    scored."""
    folders = [folder for folder in complete(root) if last is None or step_of(folder) <= last]
    scored = [(score, step_of(folder), folder) for folder in folders if (score := _score(folder)) is not None]
    return max(scored)[2] if scored else None


def _score(folder: Path) -> float | None:
    path = folder / MANIFEST
    try:
        score = json.loads(read_manifest(path)).get("score")
    except (FileNotFoundError, ValueError, AttributeError, RecursionError) as error:
        # Nothing can go on from it, so it may go. Where the disk fails (another OSError), nothing is known of it.
        _log.warning(f"{path} is missing or damaged ({error}): its checkpoint counts as one without a score")
        return None
    return score if isinstance(score, int | float) else None


def _looks_whole(folder: Path) -> bool:
    """Whether marker and manifest say that it is of the step in its name: what can be seen of damage without reading
    all of a checkpoint."""
    try:
        marker = read_text(folder / MARKER, MANIFEST_BYTES)
        manifest = json.loads(read_manifest(folder / MANIFEST))
        says_nothing = not marker and manifest["format"] == OLD_FORMAT
        said = {manifest["step"], manifest["step"] if says_nothing else json.loads(marker)["step"]}
    except OSError as error:
        if error.errno not in (errno.ENOENT, *NO_SUCH_FILE):
            raise
        return False
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return said == {step_of(folder)}


def _remove(folder: Path) -> None:
    """Errors say the whole path, as those of shutil.rmtree do not."""
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            _remove(path)
        else:
            path.unlink(missing_ok=True)
    folder.rmdir()


def prune(
    root: Path, keep: int, keep_best: bool, check: Callable[[], None] = lambda: None, last: int | None = None
) -> None:
    """Removes all but the newest `keep` complete checkpoints and, with keep_best, the one with the highest score; also
    what a killed run has left of checkpoints before the newest complete one. Those with a damaged marker or manifest
    are not counted. last: the step of this run's last one; what is ahead of it is not counted, and stays. check: called
    before each is removed."""
    found = [folder for folder in complete(root) if last is None or step_of(folder) <= last]
    kept = list(filter(_looks_whole, found))[-keep:]
    oldest = step_of(kept[0]) if len(kept) == keep else -1
    highest = best(root, last) if keep_best else None
    for folder in found:
        if step_of(folder) < oldest and folder != highest:
            check()
            unmark(folder)  # first, so that half a folder never looks whole
            _remove(folder)
    for folder in filter(_is_ours, root.glob("step-*")):
        if kept and step_of(folder) < step_of(kept[-1]) and not (folder / MARKER).exists():
            check()
            _remove(folder)
