"""Where a run writes, no other run does."""

import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from partial_fc.checkpoint.lock import Fence, gone, take
from partial_fc.checkpoint.peer.commits import Memory
from partial_fc.checkpoint.peer.transfer import all_gather_json
from partial_fc.checkpoint.saver import ranks_beside
from partial_fc.comm import World
from partial_fc.errors import describe
from partial_fc.train.begin.start import roots

T = TypeVar("T")


def hold(config: Any, world: World, memory: Memory) -> list[str]:
    """Makes the folders of a run this run's, until `let_go`. In a later world of the run they stay its own. Returns
    notes for the user. Raises ValueError, on all ranks, where another run writes there. A collective."""
    ids_W = all_gather_json([memory.run, secrets.token_hex(8)], world, "run/id")
    memory.run = next((run for run, _ in ids_W if run), ids_W[0][1])
    keepers = {root: ranks_beside(root, world)[0] for root in roots(config)}
    for owner in memory.owners.values():  # of the world before
        owner.stop()
    memory.owners.clear()
    mine = {number: root for number, root in enumerate(keepers) if keepers[root] == world.rank}
    with ThreadPoolExecutor() as pool:  # at once: each may have to wait until it is sure that another run is gone
        waits = {number: pool.submit(gone, root, memory.run) for number, root in mine.items()}
    known = {number: _tried(wait.result, mine[number], world) for number, wait in waits.items()}
    wanted = [(str(root.resolve()), socket.gethostname(), world.rank, number) for number, root in mine.items()]
    found_W = all_gather_json([[problem for _, problem in known.values() if problem], wanted], world, "run/wanted")
    for problems, _ in found_W:
        if problems:
            raise ValueError(problems[0])
    notes, facts_of = [], {}
    # In the order that another run has, too: of two that begin at once one gets all folders, not each a part.
    for _, _, keeper, number in sorted(tuple(turn) for _, turns in found_W for turn in turns):
        said: tuple[str, str, list[Any]] = "", "", []
        if keeper == world.rank:
            said = _take(mine[number], known[number][0], world, memory)
        problem, note, facts_of[keeper, number] = all_gather_json(said, world, "run/owner")[keeper]
        if problem:
            raise ValueError(problem)
        notes += [note] if note else []
    facts = {root: facts_of[keeper, number] for number, (root, keeper) in enumerate(keepers.items())}
    memory.fences = {root: Fence.of_facts(root, of_root) for root, of_root in facts.items()} | memory.owners
    return notes


def _take(root: Path, known: Any, world: World, memory: Memory) -> tuple[str, str, list[Any]]:
    """(what is wrong, note, facts of the record) of a folder that this rank keeps."""
    taken, problem = _tried(lambda: take(root, memory.run, known), root, world)
    if taken is None:
        return problem, "", []
    memory.owners[root], note = taken
    return "", note, memory.owners[root].facts


def _tried(job: Callable[[], T], root: Path, world: World) -> tuple[T | None, str]:
    """(result, what is wrong)."""
    try:
        return job(), ""
    except ValueError as error:
        return None, str(error)
    except OSError as error:
        return None, f"rank {world.rank} cannot write to {root}: {describe(error)}"


def let_go(memory: Memory) -> None:
    """The run has ended; its folders are free."""
    for owner in memory.owners.values():
        owner.release()
    memory.owners.clear()
