"""A commit that the ranks of a new world have among them (commits.py), read as a checkpoint is."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from partial_fc.checkpoint import head_state, rows
from partial_fc.checkpoint.files import as_json
from partial_fc.checkpoint.folders import newest, step_of
from partial_fc.checkpoint.head_state import Head
from partial_fc.checkpoint.peer.commits import Commit, Memory
from partial_fc.checkpoint.peer.transfer import PIECE_BYTES, all_gather_json, broadcast_tensors
from partial_fc.checkpoint.rows import Part
from partial_fc.comm import World
from partial_fc.head import PartialFC
from partial_fc.head.shard import Shard
from partial_fc.optim.compression import merge_residuals

_RANGE = "range"  # in a packed part: its [start, stop)
_log = logging.getLogger("partial_fc")


@dataclass(frozen=True)
class CommitLocation:
    """Which ranks of this world have which parts of a commit."""

    step: int
    # Which world took it.
    age: int
    # The rank that has the share of each rank of that world.
    holder_W: list[int]
    # The first rank that has taken part in it.
    root: int


def recover(memory: Memory, world: World, root: Path) -> "PeerCheckpoint | None":
    """The newest commit that this world's ranks have all of; None where there is none, or where a newer checkpoint
    below `root` is seen by all. A collective."""
    held = [
        {"step": c.step, "age": c.age, "world_size": c.local.world_size, "ranks": sorted(c.shares)}
        for c in memory.commits
    ]
    on_disk = newest(root)
    answer = {"age": memory.age, "held": held, "disk": step_of(on_disk) if on_disk else -1}
    answer_W = all_gather_json(answer, world, "recover/held")
    location = choose([answer["held"] for answer in answer_W])
    memory.age = max(answer["age"] for answer in answer_W) + 1
    disk = min(answer["disk"] for answer in answer_W)
    if location is None or disk > location.step:
        if any(answer["held"] for answer in answer_W):
            _log.warning(
                f"the ranks that are left do not have all of any commit newer than the checkpoint of step {disk}: "
                "going on from that"
                if disk >= 0
                else "the ranks that are left do not have all of any commit, and there is no checkpoint: training "
                "starts anew"
            )
        return None
    mine = next((c for c in memory.commits if (c.step, c.age) == (location.step, location.age)), None)
    memory.commits = [mine] if mine else []
    return PeerCheckpoint(location, mine, world)


def choose(held_W: list[list[dict[str, Any]]]) -> CommitLocation | None:
    """Chooses the newest commit of which the share of every rank is somewhere; of equal steps, that of the newest
    world. A rank's share comes from itself rather than from its peer. held_W: what each rank has of which commits."""
    commits = {(held["step"], held["age"]): held["world_size"] for rank_held in held_W for held in rank_held}
    for (step, age), world_size in sorted(commits.items(), reverse=True):
        ranks_W: list[list[int]] = [
            next((held["ranks"] for held in rank_held if (held["step"], held["age"]) == (step, age)), [])
            for rank_held in held_W
        ]
        holders = [[new for new, ranks in enumerate(ranks_W) if old in ranks] for old in range(world_size)]
        if all(holders):
            # Whoever keeps the fewest shares has its own at least, and is the less busy one.
            best = [min(these, key=lambda new: (len(ranks_W[new]), new)) for these in holders]
            return CommitLocation(step, age, best, next(new for new, ranks in enumerate(ranks_W) if ranks))
    return None


class PeerCheckpoint:
    """A commit, read as a checkpoint.Checkpoint is. All ranks call the same methods in the same order; each is a
    collective."""

    def __init__(self, location: CommitLocation, commit: Commit | None, world: World):
        """commit: what this rank has of it, if anything. A collective."""
        self._location, self._commit, self._world = location, commit, world
        given = json.loads(as_json(commit.local.manifest)) if commit and world.rank == location.root else None
        self.manifest: dict[str, Any] = all_gather_json(given, world, "recover/manifest")[location.root]
        self.folder = f"the commit of step {location.step}"  # where a checkpoint's folder is named

    @property
    def step(self) -> int:
        return self._location.step

    @property
    def class_names(self) -> list[str] | None:
        """None also in a process that has only come now."""
        return self._commit.local.class_names if self._commit else None

    def backbone(self) -> dict[str, Tensor]:
        return self._broadcast(self._commit.local.backbone if self._commit else None, self._location.root)

    def optimizer(self) -> dict[str, Tensor]:
        return self._broadcast(self._commit.local.optimizer if self._commit else None, self._location.root)

    def exchange(self, world: World) -> dict[str, Tensor]:
        """What this rank's gradient compression remembers, as `Checkpoint.exchange`."""
        if self._same_size:
            return self._local_below("exchange/")
        owed = [self._of_rank(rank, "exchange/") for rank in range(len(self._location.holder_W))]
        return merge_residuals(owed, world.size) if all(owed) else {}

    def buffers(self, world: World) -> dict[str, Tensor]:
        """This rank's running statistics, as `Checkpoint.buffers`."""
        return self._local_below("buffer/") if self._same_size else {}

    def load_head(self, head: Head) -> list[str]:
        """Gives the head the rows of its class range; a few pieces of each rank are on their way at a time. Returns
        what the user should know. A head without rows gets nothing."""
        if head.rows is None:
            return []
        assert isinstance(head, PartialFC)
        head.load_facts(self.manifest["head"])
        for parts in self._rounds(self._frames(head.shard.num_classes)):
            for part in parts:
                head.rows.write(part.start, part.stop, part.class_N, part.rows)
        return head_state.load_hard_negatives(self.manifest, self._hard_negatives, head, self.folder)

    # ---- rows

    def _frames(self, num_classes: int) -> Iterator[tuple[int, Part]]:
        """(rank that they are for, rows), of all shares that this rank is to give."""
        shards = [Shard.of(num_classes, rank, self._world.size) for rank in range(self._world.size)]
        for old, holder in enumerate(self._location.holder_W):
            if holder != self._world.rank or self._commit is None:
                continue
            for part in self._commit.shares[old].parts:
                for rank, shard in enumerate(shards):
                    low, high = max(part.start, shard.start), min(part.stop, shard.stop)
                    for frame in rows.cut(part, low, max(low, high), PIECE_BYTES):
                        yield rank, frame

    def _rounds(self, frames: Iterator[tuple[int, Part]]) -> Iterator[list[Part]]:
        """Sends the frames of all ranks to where they belong; what has come for this one, round by round."""
        world = self._world
        following = next(frames, None)
        while True:
            kept: list[Part] = []
            boxes: list[list[bytes]] = [[] for _ in range(world.size)]
            num_bytes = 0
            while following is not None and num_bytes < PIECE_BYTES:
                rank, frame = following
                num_bytes += frame.num_bytes
                if rank == world.rank:
                    kept.append(frame)
                else:
                    data = _packed(frame)
                    boxes[rank] += [len(data).to_bytes(8, "little"), data]
                following = next(frames, None)
            go = b"".join(data for box in boxes for data in box)
            size_W = torch.tensor([[sum(map(len, box)) for box in boxes] + [int(following is not None)]])
            size_WW = world.all_gather(size_W, name="recover/sizes")
            payload = torch.frombuffer(bytearray(go), dtype=torch.uint8) if go else torch.empty(0, dtype=torch.uint8)
            come_W = size_WW[:, world.rank].tolist()
            come = world.start_all_to_all(payload, size_W[0, :-1].tolist(), come_W, name="recover/rows").wait()
            yield [*kept, *_unpacked(bytes(come.numpy().data))]
            if not size_WW[:, -1].any():
                return

    def _hard_negatives(self) -> dict[str, Tensor]:
        """This rank's lists of as many ranks. A collective."""
        return [
            self._broadcast(
                self._commit.shares[old].hard_negatives if self._has(old) and self._commit else None, holder
            )
            for old, holder in enumerate(self._location.holder_W)
        ][self._world.rank]

    # ---- what is of one rank

    @property
    def _same_size(self) -> bool:
        return len(self._location.holder_W) == self._world.size

    def _has(self, old: int) -> bool:
        return self._location.holder_W[old] == self._world.rank

    def _local_below(self, prefix: str) -> dict[str, Tensor]:
        of_ranks = [self._of_rank(rank, prefix) for rank in range(self._world.size)]
        return of_ranks[self._world.rank]

    def _of_rank(self, old: int, prefix: str) -> dict[str, Tensor]:
        local = self._commit.shares[old].local if self._has(old) and self._commit else {}
        given = {name.removeprefix(prefix): t for name, t in local.items() if name.startswith(prefix)}
        return self._broadcast(given, self._location.holder_W[old])

    def _broadcast(self, tensors: dict[str, Tensor] | None, root: int) -> dict[str, Tensor]:
        return broadcast_tensors(tensors, root, self._world, "recover/broadcast")


def _packed(part: Part) -> bytes:
    return save(
        {name: t.contiguous() for name, t in part.tensors.items()} | {_RANGE: torch.tensor((part.start, part.stop))}
    )


def _unpacked(data: bytes) -> Iterator[Part]:
    """The parts of several `_packed`, each after its number of bytes."""
    begin = 0
    while begin < len(data):
        end = begin + 8 + int.from_bytes(data[begin : begin + 8], "little")
        tensors = load(data[begin + 8 : end])
        start, stop = tensors.pop(_RANGE).tolist()
        yield Part(start, stop, tensors)
        begin = end
