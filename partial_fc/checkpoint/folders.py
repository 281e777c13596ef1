"""The folders of checkpoints below a root: which are whole, which one to go on from, which may go."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from partial_fc.checkpoint.files import write_json
from partial_fc.files import sync_folder

MARKER = "COMPLETE"
MANIFEST = "manifest.json"
_log = logging.getLogger("partial_fc")


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """The folders below root that hold a whole checkpoint, by rising step. Those of other names (a copy,
    step-00000100.bak) are not ours. Raises OSError where the root cannot be looked into: Path.glob would find nothing
    there, and a run would begin anew."""
    try:
        folders = [root / name for name in os.listdir(root) if name.startswith("step-")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((folder for folder in folders if _is_ours(folder) and (folder / MARKER).exists()), key=step_of)


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


def mark(folder: Path, step: int, ranks: Iterable[int]) -> None:
    """Lets the folder count: all that these ranks have written there is on the disk."""
    sync_folder(folder)
    write_json({"step": step, "ranks": list(ranks)}, folder / MARKER)
    sync_folder(folder)
    sync_folder(folder.parent)


def unmark(folder: Path) -> None:
    """Lets the folder count no more."""
    if (folder / MARKER).exists():
        (folder / MARKER).unlink()
        sync_folder(folder)


def best(root: Path) -> Path | None:
    """The complete checkpoint with the highest score, the newest of equals; None where none was scored."""
    scored = [(score, step_of(folder), folder) for folder in complete(root) if (score := _score(folder)) is not None]
    return max(scored)[2] if scored else None


def _score(folder: Path) -> float | None:
    path = folder / MANIFEST
    try:
        score = json.loads(path.read_text()).get("score")
    except (FileNotFoundError, ValueError, AttributeError, RecursionError) as error:
        # Nothing can go on from it, so it may go. Where the disk fails (another OSError), nothing is known of it.
        _log.warning(f"{path} is missing or damaged ({error}): its checkpoint counts as one without a score")
        return None
    return score if isinstance(score, int | float) else None


def prune(root: Path, keep: int, keep_best: bool, check: Callable[[], None] = lambda: None) -> None:
    """Removes all but the newest `keep` complete checkpoints and, with keep_best, the one with the highest score; also
    what a killed run has left of checkpoints before the newest complete one. check: called before each is removed."""
    whole = complete(root)
    kept = {*whole[-keep:], best(root) if keep_best else None}
    for folder in whole:
        if folder not in kept:
            check()
            unmark(folder)  # first, so that half a folder never looks whole
            shutil.rmtree(folder)
    for folder in filter(_is_ours, root.glob("step-*")):
        if whole and step_of(folder) < step_of(whole[-1]) and not (folder / MARKER).exists():
            check()
            shutil.rmtree(folder)
