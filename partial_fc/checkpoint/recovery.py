"""Recovery from damage: the newest checkpoint that is valid on all ranks, and the quarantine of newer ones.

Every rank checks all that it would read, and the results are gathered. Nothing is renamed before the checkpoint to
resume from is known: if none is valid, or a disk cannot be read, all folders stay as they are. If a run is killed while
it renames, the next one finds the rest damaged again.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from partial_fc.checkpoint.consistency import common
from partial_fc.checkpoint.folders import DAMAGED, LEFT, complete, only_one_is_unreadable, quarantine, step_of
from partial_fc.checkpoint.lock import FolderLock, LostLock
from partial_fc.checkpoint.read import Checkpoint, Damaged
from partial_fc.comm import World, all_gather_json
from partial_fc.errors import describe

_log = logging.getLogger("partial_fc")
_RETRIES_S = (1.0, 3.0, 6.0)  # before a file that the disk cannot read (EIO) counts as damaged
_VALID, _DAMAGED, _REFUSED, _UNREADABLE = "valid", "damaged", "refused", "unreadable"


def latest_valid(
    root: Path, world: World, lock: FolderLock | None, after: int = -1, instead: object = None
) -> Checkpoint | None:
    """Returns the newest checkpoint below root that is valid on all ranks, of more steps than `after`; None if there is
    none. Newer ones are quarantined, with a warning, by the ranks that hold the lock of root. instead: what the run
    resumes from if there is none, if it can.

    A collective. Raises ValueError, on all ranks: if there are some, none is valid and `instead` is empty; if one
    cannot be read, which is no damage, or is not for these ranks; if a folder belongs to another run now.
    """
    folders = common(root, world, after, needed=instead is None)
    found: Checkpoint | None = None
    damaged: dict[int, str] = {}
    for step, folder in reversed(folders.items()):
        checkpoint, finding = _look(folder, world)
        finding_W = all_gather_json(finding, world, "checkpoint/valid")
        kind, message = _worst(finding_W)
        if kind == _VALID:
            found = checkpoint
            break
        if kind == _REFUSED:
            older = max((folder for other, folder in folders.items() if other < step), default=None, key=step_of)
            raise ValueError(message + (f". To go back to an older one: --resume {older}" if older else ""))
        if kind != _DAMAGED:
            raise ValueError(message)
        damaged[step] = message
    if damaged and found is None and instead is None:
        each = "; ".join(f"step {step}: {message}" for step, message in damaged.items())
        raise ValueError(
            f"no checkpoint below {root} is intact; none was renamed. {each}. Restore the files from "
            "a copy (`partial-fc checkpoint verify` names all that are damaged), resume from another checkpoint "
            "(--models-root NEW --resume DIR), or start from scratch with another --models-root"
        )
    if damaged:
        to = found.step if found else after
        _warn_once(world, [f"checkpoint of step {step}: {message}" for step, message in damaged.items()])
        moved = _quarantine(lambda: [folders[step] for step in damaged], DAMAGED, root, world, lock)
        lost = (
            f"{max(damaged) - to} step(s) that were trained are lost" if to >= 0 else "what was trained since is lost"
        )
        _warn_once(world, [*moved, f"resuming from {found.folder if found else instead}; {lost}"])
    return found


def go_back_to(found: Checkpoint, root: Path, world: World, lock: FolderLock | None) -> None:
    """Quarantines the checkpoints below root that are newer than the one that a run goes back to, as they would count
    as the newest. A collective. Raises ValueError, on all ranks, if a folder belongs to another run now."""

    def ahead() -> list[Path]:
        return [folder for folder in complete(root) if step_of(folder) > found.step]

    _warn_once(world, _quarantine(ahead, LEFT, root, world, lock))


def _look(folder: Path, world: World) -> tuple[Checkpoint | None, tuple[str, str]]:
    """Returns (the checkpoint, this rank's finding). A file that stays unreadable is damaged if only one is."""
    for pause_s in (*_RETRIES_S, None):
        checkpoint, (kind, message), unread = _look_once(folder, world)
        if unread is None or pause_s is None:
            break
        _log.warning(f"{message}: trying again in {pause_s:g} s")
        time.sleep(pause_s)
    if unread and only_one_is_unreadable(folder, unread):
        return None, (_DAMAGED, f"{unread} cannot be read ({os.strerror(errno.EIO)}), all beside it can")
    return checkpoint, (kind, message)


def _look_once(folder: Path, world: World) -> tuple[Checkpoint | None, tuple[str, str], Path | None]:
    """Returns the same as `_look`, and the file that the disk cannot read (EIO)."""
    try:
        checkpoint = Checkpoint(folder)
        if checkpoint.step != step_of(folder):
            raise Damaged(f"{folder} holds the checkpoint of step {checkpoint.step}")
        checkpoint.check_share(world.rank, world.size)
    except Damaged as error:
        return None, (_DAMAGED, error.what), None
    except ValueError as error:
        return None, (_REFUSED, str(error)), None
    except OSError as error:
        unread = Path(error.filename or folder) if error.errno == errno.EIO else None
        return None, (_UNREADABLE, describe(error)), unread
    return checkpoint, (_VALID, ""), None


def _worst(finding_W: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Combines the ranks' findings: the kind, and the message with its rank."""
    by_kind: dict[str, list[tuple[int, str]]] = {}
    for rank, (kind, message) in enumerate(finding_W):
        by_kind.setdefault(kind, []).append((rank, message))
    kind = next(kind for kind in (_UNREADABLE, _DAMAGED, _REFUSED, _VALID) if kind in by_kind)
    rank, message = by_kind[kind][0]
    others = len({text for _, text in by_kind[kind]}) - 1
    if kind == _DAMAGED:
        return kind, f"{message} (rank {rank}{f'; other ranks find {others} more' if others else ''})"
    if kind == _UNREADABLE:
        return kind, (
            f"rank {rank} cannot read a checkpoint: {message}. That is no damage, so nothing was renamed. Start "
            "again when the disk is back, or resume from an older one (--resume DIR)"
        )
    return kind, message


def _quarantine(
    choose: Callable[[], Iterable[Path]], why: str, root: Path, world: World, lock: FolderLock | None
) -> list[str]:
    """Quarantines those folders below root whose lock this rank holds; returns a line for each, the same on all ranks.
    Skips one that cannot be renamed. A collective. Raises ValueError, on all ranks, if root is another run's."""
    lines: list[str] = []
    lost, folder = "", root
    try:
        for folder in choose() if lock else ():
            assert lock is not None
            lock.check()
            try:
                lines.append(f"{folder} is now {quarantine(folder, why).name}; remove it if it is not needed")
            except OSError as error:
                lines.append(f"{folder} cannot be renamed, and is skipped: {describe(error)}")
    except LostLock as error:
        lost = str(error)
    except OSError as error:
        lines.append(f"the checkpoints in {folder} cannot be renamed, and are skipped: {describe(error)}")
    lines_W = all_gather_json((lost, lines), world, "checkpoint/quarantine")
    for lost, _ in lines_W:
        if lost:
            raise ValueError(lost)
    return list(dict.fromkeys(line for _, lines in lines_W for line in lines))


def _warn_once(world: World, lines: Iterable[str]) -> None:
    """Logs the lines on every rank, and on the terminal once."""
    for line in lines:
        _log.log(logging.WARNING if world.rank == 0 else logging.INFO, line)
