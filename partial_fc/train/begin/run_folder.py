"""Where a run writes, no other run does."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from partial_fc.checkpoint.owner import Fence, take
from partial_fc.checkpoint.peer.commits import Memory
from partial_fc.checkpoint.peer.transfer import all_gather_json
from partial_fc.checkpoint.saver import ranks_beside
from partial_fc.comm import World
from partial_fc.errors import describe
from partial_fc.train.begin.start import roots


def hold(config: Any, world: World, memory: Memory) -> list[str]:
    """Makes the folders of a run this run's, until `let_go`. In a later world of the run they stay its own. Returns
    notes for the user. Raises ValueError, on all ranks, where another run writes there. A collective."""
    ids_W = all_gather_json([memory.run, secrets.token_hex(8)], world, "run/id")
    memory.run = next((run for run, _ in ids_W if run), ids_W[0][1])
    keepers = {root: ranks_beside(root, world)[0] for root in roots(config)}
    for owner in memory.owners.values():  # of the world before
        owner.stop()
    memory.owners.clear()
    problems, notes = [], []
    with ThreadPoolExecutor() as pool:  # at once: each may have to wait until it is sure that another run is gone
        mine = [root for root, keeper in keepers.items() if keeper == world.rank]
        taken = {root: pool.submit(take, root, memory.run) for root in mine}
    for root, future in taken.items():
        try:
            memory.owners[root], note = future.result()
            notes += [note] if note else []
        except ValueError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"rank {world.rank} cannot write to {root}: {describe(error)}")
    records = [memory.owners[root].facts if root in memory.owners else [] for root in keepers]
    found_W = all_gather_json([problems, notes, records], world, "run/owner")
    for problems, _, _ in found_W:
        if problems:
            raise ValueError(problems[0])
    facts_of = {root: found_W[keeper][2][number] for number, (root, keeper) in enumerate(keepers.items())}
    memory.fences = {root: Fence.of_facts(root, facts) for root, facts in facts_of.items()} | memory.owners
    return [note for _, notes, _ in found_W for note in notes]


def let_go(memory: Memory) -> None:
    """The run has ended; its folders are free."""
    for owner in memory.owners.values():
        owner.release()
    memory.owners.clear()
