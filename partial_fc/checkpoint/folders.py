"""The folders of checkpoints below a root: which are complete, which is the newest, which may be removed."""

import errno
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from partial_fc.checkpoint.files import write_json
from partial_fc.files import MANIFEST_BYTES, NO_SUCH_FILE, about, read_manifest, read_text, regular, sync_folder

MARKER = "COMPLETE"
MANIFEST = "manifest.json"
# A quarantined folder is named step-N and one of these words, and a number if the name is taken.
DAMAGED, LEFT = "damaged", "left"
_QUARANTINED = re.compile(rf"step-\d+\.({DAMAGED}|{LEFT})(-\d+)?")
_log = logging.getLogger("partial_fc")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def all_steps(root: Path) -> list[Path]:
    """Returns the folders of checkpoints below root, complete or not, by rising step; other names (step-00000100.bak)
    are ignored. Raises OSError for an unreadable root, in which Path.glob would find nothing."""
    try:
        folders = [root / name for name in os.listdir(root) if name.startswith("step-")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(filter(_is_ours, folders), key=step_of)


def complete(root: Path) -> list[Path]:
    """Returns those of `all_steps` that have their marker; they may be damaged (`recovery.latest_valid` checks)."""
    return [folder for folder in all_steps(root) if (folder / MARKER).exists()]


def newest(root: Path) -> Path | None:
    """Returns the complete checkpoint with the most steps below root."""
    return max(complete(root), key=step_of, default=None)


def is_step(folder: Path) -> bool:
    """Returns whether this is the folder of one checkpoint, complete or not, rather than a folder of checkpoints."""
    return (folder / MANIFEST).exists() or (folder / MARKER).exists()


def step_folder(folder: Path) -> Path:
    """Returns the folder itself, or the newest complete checkpoint in it. Raises ValueError if there is none."""
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
    """Returns the folders of checkpoints, complete or not, in this folder, by name."""
    for root in (folder, folder / "checkpoints"):
        steps = sorted(path for path in root.glob("step-*") if path.is_dir())
        if steps:
            return steps
    raise ValueError(f"{folder} holds no checkpoint; expected a folder step-N, or one with such folders")


def step_of(folder: Path) -> int:
    """Returns the step in a folder's name. Raises ValueError for another folder."""
    return int(folder.name.removeprefix("step-"))


def _is_ours(folder: Path) -> bool:
    return folder.name.removeprefix("step-").isdecimal()


def only_one_is_unreadable(folder: Path, bad: Path) -> bool:
    """Returns whether `bad`, which the disk cannot read, is one file of a checkpoint whose other files are readable, by
    their first bytes; not so if the whole disk is away or broken."""
    try:
        beside = [folder / name for name in os.listdir(folder) if name != bad.name]
        for path in beside:
            with about(path), open(path, "rb", opener=regular) as file:
                file.read(4096)
    except OSError:
        return False
    return bad.parent == folder and folder / MARKER in beside


def is_quarantined(folder: Path) -> bool:
    """Returns whether its name is one that `quarantine` gives."""
    return _QUARANTINED.fullmatch(folder.name) is not None


def quarantine(folder: Path, why: str) -> Path:
    """Renames a checkpoint so that no run resumes from it or removes it; its contents stay. why: DAMAGED, or LEFT if a
    run goes back behind it. Returns the new path. Raises OSError."""
    names = (f"{folder.name}.{why}{f'-{number}' if number > 1 else ''}" for number in count(1))
    renamed = next(path for name in names if not os.path.lexists(path := folder.with_name(name)))
    folder.rename(renamed)
    sync_folder(folder.parent)
    return renamed


def mark(folder: Path, step: int, ranks: Iterable[int]) -> None:
    """Writes the marker: all that these ranks have written there is on the disk."""
    sync_folder(folder)
    write_json({"step": step, "ranks": list(ranks)}, folder / MARKER)
    sync_folder(folder)
    sync_folder(folder.parent)


def add_to_marker(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Adds facts to the marker, for what is known only after the checkpoint was complete: its score. Returns whether it
    is. Raises OSError, ValueError for a damaged marker."""
    if not (folder / MARKER).exists():
        return False
    write_json({**json.loads(read_text(folder / MARKER, MANIFEST_BYTES)), **facts}, folder / MARKER)
    sync_folder(folder)
    return True


def unmark(folder: Path) -> None:
    """Removes the marker. If it is missing already, the removal may not be synced yet: the sync may be what failed."""
    if folder.exists():
        (folder / MARKER).unlink(missing_ok=True)
        sync_folder(folder)


def best(root: Path, last: int | None = None) -> Path | None:
    """Returns the complete checkpoint of the highest score, up to step `last`; the newest of equals; None: no score."""
    folders = [folder for folder in complete(root) if last is None or step_of(folder) <= last]
    scored = [(score, step_of(folder), folder) for folder in folders if (score := _score(folder)) is not None]
    return max(scored)[2] if scored else None


def _score(folder: Path) -> float | None:
    path = folder / MANIFEST
    try:
        marker = read_text(folder / MARKER, MANIFEST_BYTES)
        score = json.loads(read_manifest(path) if '"score"' not in marker else marker).get("score")
    except (FileNotFoundError, ValueError, AttributeError, RecursionError) as error:
        if not folder.exists():  # removed meanwhile
            return None
        # No run can resume from it, so it may be removed. If the disk fails (another OSError), nothing is known of it.
        _log.warning(f"{path} is missing or damaged ({error}): its checkpoint counts as one without a score")
        return None
    return score if isinstance(score, int | float) else None


def _looks_whole(folder: Path) -> bool:
    """Returns whether marker and manifest match its step: the damage that shows without reading all files."""
    try:
        marker = read_text(folder / MARKER, MANIFEST_BYTES)
        manifest = json.loads(read_manifest(folder / MANIFEST))
        steps = {manifest["step"], json.loads(marker)["step"]}
    except OSError as error:
        if error.errno not in (errno.ENOENT, *NO_SUCH_FILE):
            raise
        return False
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return steps == {step_of(folder)}


def _remove(folder: Path) -> None:
    """Removes the folder. Errors have the whole path, which those of shutil.rmtree lack."""
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            _remove(path)
        else:
            path.unlink(missing_ok=True)
    folder.rmdir()


def prune(
    root: Path, keep: int, keep_best: bool, check: Callable[[], object] = lambda: None, last: int | None = None
) -> None:
    """Removes all but the newest `keep` complete checkpoints and, with keep_best, the one with the highest score; also
    remains of killed runs before the newest complete one. Those with a damaged marker or manifest do not count. last:
    the step of this run's last one; later ones do not count, and stay. check: called before each is removed."""
    found = [folder for folder in complete(root) if last is None or step_of(folder) <= last]
    kept = list(filter(_looks_whole, found))[-keep:]
    oldest = step_of(kept[0]) if len(kept) == keep else -1
    highest = best(root, last) if keep_best else None
    for folder in found:
        if step_of(folder) < oldest and folder != highest:
            check()
            unmark(folder)  # first, so that a partly removed folder is never complete
            _remove(folder)
    for folder in filter(_is_ours, root.glob("step-*")):
        if kept and step_of(folder) < step_of(kept[-1]) and not (folder / MARKER).exists():
            check()
            _remove(folder)
