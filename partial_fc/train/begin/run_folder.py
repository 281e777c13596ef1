"""The locks of a run's folders, so that no other run writes there."""

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from partial_fc import errors
from partial_fc.checkpoint.lock import Fence, FolderLock, Record, acquire
from partial_fc.checkpoint.saver import ranks_beside
from partial_fc.comm import World, all_gather_json
from partial_fc.errors import describe
from partial_fc.train.begin.start import roots


@dataclass
class Folders:
    """The folders of a run, as one of its ranks has them locked. run: its name in their records."""

    run: str
    # By folder: the records that this process refreshes; and the records, whichever rank refreshes them.
    locks: dict[Path, FolderLock] = field(default_factory=dict)
    fences: Mapping[Path, Fence] = field(default_factory=dict)

    def release(self) -> None:
        """Frees the folders at the end of a run."""
        for lock in self.locks.values():
            lock.release()
        self.locks.clear()


def hold_folders(config: Any, world: World) -> tuple[Folders, list[str]]:
    """Locks the folders of a run until `Folders.release`. Returns them, and notes for the user. Raises ValueError, on
    all ranks, if another run writes there. A collective."""
    folders = Folders(all_gather_json(secrets.token_hex(8), world, "run/id")[0])
    try:
        return folders, _lock(folders, config, world)
    except BaseException:
        folders.release()
        raise


def _lock(folders: Folders, config: Any, world: World) -> list[str]:
    beside = {root: ranks_beside(root, world) for root in roots(config)}
    owners = {root: ranks[0] for root, ranks in beside.items()}
    mine = [root for root, owner in owners.items() if owner == world.rank]
    turns = [(str(root.resolve()), socket.gethostname(), world.rank, list(owners).index(root)) for root in mine]
    turns_W = all_gather_json(turns, world, "run/wanted")
    notes, facts_of = separate(beside, world.size), {}
    # In the same order as other runs: of two that start at once one gets all folders.
    for _, _, owner, number in sorted(tuple(turn) for turns in turns_W for turn in turns):
        root = list(owners)[number]
        answer = _take(root, world, folders) if owner == world.rank else None
        problem, note, facts_of[owner, number] = all_gather_json(answer, world, "run/lock")[owner]
        if problem:
            raise errors.RefusedByAll(problem)
        notes += [note] if note else []
    facts = {root: facts_of[owner, number] for number, (root, owner) in enumerate(owners.items())}
    folders.fences = {root: Fence(root, Record(**of_root)) for root, of_root in facts.items()} | folders.locks
    return notes


def separate(beside: Mapping[Path, list[int]], size: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns a note if torchrun's restarts could not resume. beside: the ranks that share each folder."""
    folders = [str(root) for root, ranks in beside.items() if len(ranks) < size]
    if not folders or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return []
    return [f"the hosts do not share {' and '.join(folders)}: restarts need all of them (docs/reliability.md)"]


def _take(root: Path, world: World, folders: Folders) -> tuple[str, str, dict[str, Any]]:
    """Returns (the error, a note, the facts of the record) for a folder that this rank locks."""
    try:
        folders.locks[root], note = acquire(root, folders.run)
    except ValueError as error:
        return str(error), "", {}
    except OSError as error:
        return f"rank {world.rank} cannot write to {root}: {describe(error)}", "", {}
    return "", note, asdict(folders.locks[root].record)
