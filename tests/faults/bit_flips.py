"""Turns single bits in commits that are kept in memory, or on their way, over and over:

    python -m tests.faults.bit_flips --flips 1000 --seed 1

Ranks are threads. Every turned bit must be found and named; what is gone on from must be, bit for bit, the newest
commit of which the ranks that are left have everything undamaged, and where there is none, no commit at all.
AssertionError: it is not.
"""

import argparse
import dataclasses
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from partial_fc.checkpoint.peer.commits import Commit, PeerCopies, ProcessState
from partial_fc.checkpoint.peer.restore import recover
from tests.faults.disk.sweep import listening
from tests.unit.checkpoint.test_peer_commits import EVERY, C, D, commit, head_of, one_step, same, snapshot_of
from tests.unit.thread_world import ThreadWorld, in_world

SIZE = 3  # ranks of the world whose commits they are; the peer of each is the next
_NOWHERE = Path("/nonexistent")


def two_commits() -> list[ProcessState]:
    """Of a world, by rank: each has two whole commits."""

    def train(world: ThreadWorld) -> ProcessState:
        head, memory = head_of(world), ProcessState()
        for _ in range(3):
            one_step(head, world, C, D)
        commit(memory, head, world)
        commit(memory, head, world)
        assert len(memory.commits) == 2
        return memory

    return in_world(SIZE, train)


def copy_of(memory: ProcessState) -> ProcessState:
    """With lists of its own; the tensors are the same."""
    return ProcessState([dataclasses.replace(c, shares=dict(c.shares)) for c in memory.commits], memory.generation)


def go_on(
    memories: list[ProcessState], wire: Callable[[ThreadWorld], ThreadWorld] = lambda world: world
) -> list[dict[str, Any]] | None:
    """What the ranks that are left go on with. wire: what each talks through."""

    def act(world: ThreadWorld) -> dict[str, Any] | None:
        through = wire(world)
        found = recover(memories[world.rank], through, _NOWHERE)
        if found is None:
            return None
        head = head_of(world)
        found.load_head(head)
        tables = head.row_state() | found.backbone() | found.optimizer() | found.buffers(through)
        return {"step": torch.tensor(found.step)} | {name: t.clone() for name, t in tables.items()}

    states = in_world(len(memories), act)
    assert len({state is None for state in states}) == 1
    return None if states[0] is None else [state for state in states if state is not None]


def turn(draw: random.Random, tensors: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor, int, int]:
    """Turns a bit; every byte is as likely as another. Returns what `turn_back` needs, the tensor's name first."""
    names = [name for name in tensors if tensors[name].nbytes]
    (name,) = draw.choices(names, [tensors[name].nbytes for name in names])
    data = tensors[name].reshape(-1).view(torch.uint8)
    at, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
    data[at] ^= bit
    return name, data, at, bit


def kept(memories: list[ProcessState], flips: int, draw: random.Random) -> int:
    """Bits of what is kept, up to four at a time. Returns how many."""
    expected: dict[tuple[tuple[int, ...], int], Any] = {}
    count = 0
    while count < flips:
        lost = draw.choice([None, *range(SIZE)])
        left = tuple(rank for rank in range(SIZE) if rank != lost)
        turned, marks = [], set()
        for _ in range(draw.randrange(1, 5)):
            rank, number = draw.choice(left), draw.randrange(2)
            part, tensors = draw.choice(list(pieces(memories[rank].commits[number])))
            if (rank, number, part) in marks:
                continue
            share = memories[rank].commits[number].shares.get(part, memories[rank].commits[number].local)
            turned.append(turn(draw, tensors))
            assert share.damaged(tensors) == [turned[-1][0]], "a turned bit was not found, or not named"
            marks.add((rank, number, part))
        with listening([]) as told:
            result = go_on([copy_of(memories[rank]) for rank in left])
        for _, data, at, bit in turned:
            data[at] ^= bit
        count += len(turned)
        whole = [number for number in range(2) if is_whole(left, number, marks)]
        assert (result is None) == (not whole)
        if 1 not in whole:
            assert any(name in line for name, *_ in turned for line in told), told
        if result is None:
            continue
        key = (left, whole[-1])
        if key not in expected:
            older = [copy_of(memories[rank]) for rank in left]
            for memory in older:
                memory.commits = memory.commits[: whole[-1] + 1]
            expected[key] = go_on(older)
        assert all(same(one, other) for one, other in zip(result, expected[key], strict=True))
    return count


def pieces(here: Commit) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """(whose share, -1: what is equal on all; its tensors) of what one rank has of a commit."""
    yield -1, here.local.replicated
    for rank, share in here.shares.items():
        yield rank, share.own


def is_whole(left: tuple[int, ...], number: int, marks: set[tuple[int, int, int]]) -> bool:
    """Whether what is undamaged is enough: shares lie on their rank and on the next, what is equal on all on each."""
    there = [any((r, number, of) not in marks for r in left if r in (of, (of + 1) % SIZE)) for of in range(SIZE)]
    return all(there) and any((rank, number, -1) not in marks for rank in left)


class Cable(ThreadWorld):
    """Turns a bit of what one rank receives of one message of a collective."""

    def __init__(self, world: ThreadWorld, name: str, rank: int, after: int, bit: int):
        super().__init__(world.rank, world.meeting)
        self._where, self._after, self._bit = (name, rank), after, bit
        self.turned = 0

    def _spoil(self, t: torch.Tensor, name: str) -> torch.Tensor:
        if (name, self.rank) != self._where or not t.nbytes:
            return t
        self._after -= t.nbytes
        if self._after >= 0 or self.turned:
            return t
        self.turned += 1
        t = t.clone()
        t.reshape(-1).view(torch.uint8)[self._bit // 8 % t.nbytes] ^= 1 << self._bit % 8
        return t

    def _all_to_all(self, t, rows, arriving, name):
        finish = super()._all_to_all(t, rows, arriving, name)
        return lambda: self._spoil(finish(), name)

    def _broadcast(self, t, root, name):
        finish = super()._broadcast(t, root, name)
        return lambda: finish() if root == self.rank else self._spoil(finish(), name)


def sent(flips: int, draw: random.Random) -> None:
    """Bits of what goes to the peer: the commit is given up on all ranks, the one before stands."""
    for _ in range(flips):
        rank, after, bit = draw.randrange(SIZE), draw.randrange(600), draw.randrange(1 << 30)

        def train(world: ThreadWorld, rank=rank, after=after, bit=bit) -> tuple[list[int], int]:
            head, memory = head_of(world), ProcessState()
            one_step(head, world, C, D)
            cable = Cable(world, "peer/share", rank, after, bit)
            before = PeerCopies(memory, world, EVERY)
            before.begin(snapshot_of(head, world))
            before.finish()
            copies = PeerCopies(memory, cable, EVERY)
            one_step(head, world, C, D)
            copies.begin(snapshot_of(head, world))
            copies.finish()
            return [each.step for each in memory.commits], cable.turned

        with listening([]) as told:
            found = in_world(SIZE, train)
        assert [turned for _, turned in found] == [int(other == rank) for other in range(SIZE)]
        assert [steps for steps, _ in found] == [[1]] * SIZE
        name = f"as it arrived on rank {rank}: its CRC-32 is another"
        assert any(f"of rank {(rank - 1) % SIZE} is damaged {name}" in line for line in told), told
        assert sum("the commit of step 2 is given up on all ranks" in line for line in told) == SIZE


def recovered(memories: list[ProcessState], flips: int, draw: random.Random) -> None:
    """Bits of what goes to a new rank in recovery: it is sent again."""
    whole = go_on([ProcessState(), *map(copy_of, memories[1:])])
    assert whole is not None
    for _ in range(flips):
        name, after, bit = (
            draw.choice(["recover/rows", "recover/broadcast"]),
            draw.randrange(40),
            draw.randrange(1 << 30),
        )
        cables: list[Cable] = []

        def wire(world: ThreadWorld, name=name, after=after, bit=bit, cables=cables) -> Cable:
            cables.append(Cable(world, name, 0, after, bit))
            return cables[-1]

        with listening([]) as told:
            result = go_on([ProcessState(), *map(copy_of, memories[1:])], wire)
        assert sum(cable.turned for cable in cables) == 1
        assert any("arrived damaged on rank 0" in line for line in told), told
        assert result is not None
        assert all(same(one, other) for one, other in zip(result, whole, strict=True))


def attack(flips: int, seed: int) -> dict[str, float]:
    """Returns figures."""
    began = time.perf_counter()
    draw, memories = random.Random(seed), two_commits()
    count = kept(memories, flips // 2, draw)
    recovered(memories, flips // 4, draw)
    sent(flips // 4, draw)
    return {"flips": count + 2 * (flips // 4), "seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(attack(options.flips, options.seed))


if __name__ == "__main__":
    main()
