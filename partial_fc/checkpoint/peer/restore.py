"""Recovery from a commit in the memory of a new world's ranks (commits.py), read like a checkpoint."""

import json
import logging
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from partial_fc.checkpoint import crc32, head_state, rows
from partial_fc.checkpoint.folders import newest, step_of
from partial_fc.checkpoint.peer.commits import Commit, ProcessState, damage
from partial_fc.checkpoint.peer.transfer import PIECE_BYTES, ArrivedDamaged, broadcast_tensors, check_arrived
from partial_fc.checkpoint.rows import Part
from partial_fc.checkpoint.snapshot import Snapshot, buffers_in
from partial_fc.comm import World, all_gather_json
from partial_fc.head.protocol import Head, Table
from partial_fc.head.shard import Shard

_Tensors = dict[str, Tensor]
_T = TypeVar("_T")
_RANGE = "range"  # in a packed part: its [start, stop)
_CRC_BYTES = 4
_TRIES = 3  # of receiving something undamaged
_log = logging.getLogger("partial_fc")


@dataclass(frozen=True)
class CommitLocation:
    """The ranks of this world that have the shares of a commit."""

    step: int
    # The world that took it.
    generation: int
    # The rank that has the share of each rank of that world.
    holder_W: list[int]
    # The first rank that has the replicated state.
    root: int


def recover(process: ProcessState, world: World, root: Path) -> "PeerCheckpoint | None":
    """Returns the newest commit that this world's ranks have completely and undamaged; None if there is none, or if all
    see a newer checkpoint below `root`. A collective."""
    on_disk = newest(root)
    damaged = True
    while damaged:
        held = [
            {
                "step": c.step,
                "generation": c.generation,
                "world_size": c.local.world_size,
                "ranks": sorted(c.shares),
                "leads": c.can_lead,
            }
            for c in process.commits
        ]
        answer = {"generation": process.generation, "held": held, "disk": step_of(on_disk) if on_disk else -1}
        answer_W = all_gather_json(answer, world, "recover/held")
        location = choose([answer["held"] for answer in answer_W])
        disk = min(answer["disk"] for answer in answer_W)
        if location is None or disk > location.step:
            break
        # Damaged shares no longer count; another rank may have the same.
        here = _leave_out_damaged(_commit_at(location, process), location, world.rank)
        damaged = bool(world.all_gather(torch.tensor([here]), name="recover/damaged").any())
    process.generation = max(answer["generation"] for answer in answer_W) + 1
    if location is None or disk > location.step:
        if any(answer["held"] for answer in answer_W):
            instead = f"resuming from the checkpoint of step {disk}" if disk >= 0 else "training starts from step 0"
            _log.warning(f"the remaining ranks do not hold all of any newer commit: {instead}")
        return None
    return PeerCheckpoint(location, _commit_at(location, process), world)


def _commit_at(location: CommitLocation, process: ProcessState) -> Commit | None:
    """Returns this rank's shares of the commit, if any."""
    return next((c for c in process.commits if (c.step, c.generation) == (location.step, location.generation)), None)


def _leave_out_damaged(commit: Commit | None, location: CommitLocation, rank: int) -> bool:
    """Checks this rank's shares of a commit, and removes damaged ones. Returns whether there were any."""
    found = False
    for old, holder in enumerate(location.holder_W):
        if commit is None or holder != rank:
            continue
        names = commit.shares[old].damaged(commit.shares[old].own)
        if names:
            _log.error(damage(commit.step, old, names, f"in the memory of rank {rank}"))
            del commit.shares[old]
            found = True
    if commit is not None and location.root == rank:
        names = commit.local.damaged(commit.local.replicated)
        names += ["the manifest"] if zlib.crc32(commit.manifest) != commit.manifest_crc else []
        if names:
            _log.error(damage(commit.step, commit.local.rank, names, f"in the memory of rank {rank}"))
            commit.can_lead = False
            found = True
    return found


def choose(held_W: list[list[dict[str, Any]]]) -> CommitLocation | None:
    """Returns the newest commit of which the share of every rank is available; of equal steps, that of the newest
    world. A rank's own share is preferred to its replica. held_W: the shares of each rank, by commit."""
    commits = {(held["step"], held["generation"]): held["world_size"] for rank_held in held_W for held in rank_held}
    for (step, generation), world_size in sorted(commits.items(), reverse=True):
        ranks_W: list[list[int]] = [
            next((held["ranks"] for held in rank_held if (held["step"], held["generation"]) == (step, generation)), [])
            for rank_held in held_W
        ]
        leading = [
            new
            for new, rank_held in enumerate(held_W)
            if any(held["leads"] and (held["step"], held["generation"]) == (step, generation) for held in rank_held)
        ]
        holders = [[new for new, ranks in enumerate(ranks_W) if old in ranks] for old in range(world_size)]
        if all(holders) and leading:
            # The rank with the fewest shares has at least its own, and is less busy.
            best = [min(these, key=lambda new: (len(ranks_W[new]), new)) for these in holders]
            return CommitLocation(step, generation, best, leading[0])
    return None


class PeerCheckpoint:
    """A commit, with the methods of checkpoint.Checkpoint. All but `keep_alone` are collectives, in the same order."""

    def __init__(self, location: CommitLocation, commit: Commit | None, world: World):
        """commit: this rank's shares, if any. A collective."""
        self._location, self._commit, self._world = location, commit, world
        given = json.loads(commit.manifest) if commit and world.rank == location.root else None
        self.manifest: dict[str, Any] = all_gather_json(given, world, "recover/manifest")[location.root]
        self.step = location.step
        self.folder = f"the commit of step {location.step}"  # printed instead of a checkpoint's folder

    def keep_alone(self, process: ProcessState) -> None:
        """Removes all other commits, once everything has been loaded: until then, another may be needed."""
        process.commits = [self._commit] if self._commit else []

    def backbone(self) -> dict[str, Tensor]:
        return self._broadcast(self._commit.local.backbone if self._commit else None, self._location.root)

    def optimizer(self) -> dict[str, Tensor]:
        return self._broadcast(self._commit.local.optimizer if self._commit else None, self._location.root)

    def buffers(self, world: World) -> dict[str, Tensor]:
        """Returns the same as `Checkpoint.buffers`."""
        return self._of_this_rank(lambda share: buffers_in(share.local)) if self._same_size else {}

    def load_head(self, head: Head) -> list[str]:
        """Loads the rows of its class range into each table, a piece per rank at a time. Returns notes for the user."""

        def load_rows(table: Table, stored: dict[str, Any]) -> list[str]:
            table.load_facts(stored["head"])
            self._received(partial(self._load_rows, table))
            return []

        def lists(name: str) -> _Tensors:
            return self._of_this_rank(lambda share: share.tables[name].hard_negatives)

        return head_state.load_head(self.manifest, head, self.folder, load_rows, lists)

    def _received(self, receive: Callable[[], _T]) -> _T:
        """Returns what `receive` returns; repeats it, on all ranks, if something arrived damaged."""
        for left in reversed(range(_TRIES)):
            try:
                return receive()
            except ArrivedDamaged as error:
                _log.error(f"{self.folder}: {error}" + (", once more" if left else ""))
                if not left:
                    raise
        raise AssertionError

    # ---- rows

    def _load_rows(self, table: Table) -> None:
        damaged: list[str] = []
        for part in self._parts(table, damaged):
            table.rows.write(part.start, part.stop, part.class_N, part.rows)
        check_arrived(damaged, self._world, "recover/rows")

    def _parts(self, table: Table, damaged: list[str]) -> Iterator[Part]:
        """Yields the rows of this rank's classes, from all ranks, without damaged parts, which `damaged` collects."""
        world = self._world

        def kept(rank: int) -> Iterator[Part]:
            return self._kept(table.name, Shard.of(table.num_classes, rank, world.size))

        yield from kept(world.rank)
        # Each starts with the next rank, so that not all send to one.
        others = [(world.rank + i) % world.size for i in range(1, world.size)]
        outgoing = ((rank, part) for rank in others for part in kept(rank))
        while True:
            to, part = next(outgoing, (world.rank, None))
            data = _packed(part) if part else torch.empty(0, dtype=torch.uint8)
            go_W = [len(data) if rank == to else 0 for rank in range(world.size)]
            size_WW = world.all_gather(torch.tensor([go_W]), name="recover/sizes")
            if not size_WW.any():
                return
            come_W = size_WW[:, world.rank].tolist()
            come = world.start_all_to_all(data, go_W, come_W, name="recover/rows").wait()
            for rank, data in enumerate(come.split(come_W)):
                if len(data) and _crc_is_right(data):
                    yield _unpacked(data)
                elif len(data):
                    damaged.append(f"a part of the classes from rank {rank}")

    def _kept(self, table: str, shard: Shard) -> Iterator[Part]:
        """Yields the rows of these classes in the shares that this rank provides, at most PIECE_BYTES at a time."""
        given = [old for old, holder in enumerate(self._location.holder_W) if holder == self._world.rank]
        for share in (self._commit.shares[old] for old in given if self._commit):
            for part in share.tables[table].parts:
                low, high = max(part.start, shard.start), min(part.stop, shard.stop)
                yield from rows.cut(part, low, max(low, high), PIECE_BYTES)

    # ---- state of one rank

    @property
    def _same_size(self) -> bool:
        return len(self._location.holder_W) == self._world.size

    def _of_this_rank(self, take: Callable[[Snapshot], _Tensors]) -> _Tensors:
        """Returns what `take` takes from the share of this rank, from a world of equal size."""
        taken = []
        for old, holder in enumerate(self._location.holder_W):
            share = self._commit.shares[old] if self._commit and holder == self._world.rank else None
            taken.append(self._broadcast(take(share) if share else None, holder))
        return taken[self._world.rank]

    def _broadcast(self, tensors: _Tensors | None, root: int) -> _Tensors:
        return self._received(lambda: broadcast_tensors(tensors, root, self._world, "recover/broadcast"))


def _packed(part: Part) -> Tensor:
    """Returns a part as bytes, followed by their CRC-32 (4 bytes)."""
    tensors = {name: t.contiguous() for name, t in part.tensors.items()}
    data = bytearray(save(tensors | {_RANGE: torch.tensor((part.start, part.stop))}))
    data += crc32.crc32(torch.frombuffer(data, dtype=torch.uint8)).to_bytes(_CRC_BYTES, "little")
    return torch.frombuffer(data, dtype=torch.uint8)


def _crc_is_right(data_N: Tensor) -> bool:
    return crc32.crc32(data_N[:-_CRC_BYTES]).to_bytes(_CRC_BYTES, "little") == bytes(data_N[-_CRC_BYTES:].tolist())


def _unpacked(data_N: Tensor) -> Part:
    tensors = load(bytes(data_N[:-_CRC_BYTES].numpy().data))
    start, stop = tensors.pop(_RANGE).tolist()
    return Part(start, stop, tensors)
