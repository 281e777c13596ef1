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

from partial_fc.checkpoint.files import as_json
from partial_fc.checkpoint.folders import newest, step_of
from partial_fc.checkpoint.peer.commits import Commit, Memory
from partial_fc.checkpoint.peer.transfer import PIECE_BYTES, spread, tell
from partial_fc.checkpoint.rows import Part
from partial_fc.comm import World
from partial_fc.head import PartialFC
from partial_fc.head.shard import Shard
from partial_fc.optim.compression import merge_residuals

_RANGE = "range"  # in a frame: the classes [low, high) that its rows are all the made ones of
_log = logging.getLogger("partial_fc")


@dataclass(frozen=True)
class Found:
    """Where a commit is."""

    step: int
    age: int  # of the world that took it
    holder_W: list[int]  # the rank that has the share of each rank of that world
    root: int  # the first rank that has taken part in it


def recover(memory: Memory, world: World, root: Path) -> "Recovered | None":
    """The newest commit that this world's ranks have all of; None where there is none, or where a newer checkpoint
    below `root` is seen by all. A collective."""
    held = [
        {"step": c.step, "age": c.age, "world_size": c.own.world_size, "ranks": sorted(c.shares)}
        for c in memory.commits
    ]
    on_disk = newest(root)
    said_W = tell({"age": memory.age, "held": held, "disk": step_of(on_disk) if on_disk else -1}, world, "recover/held")
    found = choose([said["held"] for said in said_W])
    memory.age = max(said["age"] for said in said_W) + 1
    disk = min(said["disk"] for said in said_W)
    if found is None or disk > found.step:
        if any(said["held"] for said in said_W):
            _log.warning(
                f"the ranks that are left do not have all of any commit newer than the checkpoint of step {disk}: "
                "going on from that"
                if disk >= 0
                else "the ranks that are left do not have all of any commit, and there is no checkpoint: training "
                "starts anew"
            )
        return None
    mine = next((c for c in memory.commits if (c.step, c.age) == (found.step, found.age)), None)
    memory.commits = [mine] if mine else []
    return Recovered(found, mine, world)


def choose(held_W: list[list[dict[str, Any]]]) -> Found | None:
    """held_W: what each rank has of which commits. The newest commit of which the share of every rank is somewhere;
    of equal steps, that of the newest world. A rank's share is taken from itself rather than from its buddy."""
    commits = {(held["step"], held["age"]): held["world_size"] for told in held_W for held in told}
    for (step, age), world_size in sorted(commits.items(), reverse=True):
        ranks_W: list[list[int]] = [
            next((held["ranks"] for held in told if (held["step"], held["age"]) == (step, age)), []) for told in held_W
        ]
        holders = [[new for new, ranks in enumerate(ranks_W) if old in ranks] for old in range(world_size)]
        if all(holders):
            # Whoever keeps the fewest shares has its own at least, and is the less busy one.
            best = [min(these, key=lambda new: (len(ranks_W[new]), new)) for these in holders]
            return Found(step, age, best, next(new for new, ranks in enumerate(ranks_W) if ranks))
    return None


class Recovered:
    """As checkpoint.Checkpoint. All ranks call the same methods in the same order; each is a collective."""

    def __init__(self, found: Found, commit: Commit | None, world: World):
        """commit: what this rank has of it, if anything. A collective."""
        self._found, self._commit, self._world = found, commit, world
        given = json.loads(as_json(commit.own.manifest)) if commit and world.rank == found.root else None
        self.manifest: dict[str, Any] = tell(given, world, "recover/manifest")[found.root]
        self.folder = f"the commit of step {found.step}"  # where a checkpoint's folder is named

    @property
    def step(self) -> int:
        return self._found.step

    @property
    def class_names(self) -> list[str] | None:
        """None also in a process that has only come now."""
        return self._commit.own.class_names if self._commit else None

    def backbone(self) -> dict[str, Tensor]:
        return self._spread(self._commit.own.backbone if self._commit else None, self._found.root)

    def optimizer(self) -> dict[str, Tensor]:
        return self._spread(self._commit.own.optimizer if self._commit else None, self._found.root)

    def exchange(self, world: World) -> dict[str, Tensor]:
        """What this rank's gradient compression remembers, as `Checkpoint.exchange`."""
        if self._same_size:
            return self._own_below("exchange/")
        owed = [self._of_rank(rank, "exchange/") for rank in range(len(self._found.holder_W))]
        return merge_residuals(owed, world.size) if all(owed) else {}

    def buffers(self, world: World) -> dict[str, Tensor]:
        """This rank's running statistics, as `Checkpoint.buffers`."""
        return self._own_below("buffer/") if self._same_size else {}

    def load_head(self, head: PartialFC) -> list[str]:
        """Gives the head the rows of its class range; a few pieces of each rank are on their way at a time."""
        head.load_facts(self.manifest["head"])
        for parts in self._rounds(self._frames(head), head):
            for part in parts:
                low, high = part[_RANGE].tolist()
                class_M = part["class"] if "class" in part else torch.arange(low, high)
                rows = {name: t for name, t in part.items() if name not in (_RANGE, "class")}
                head.load_classes(low, high, class_M, rows)
        return self._load_hard_negatives(head)

    # ---- rows

    def _frames(self, head: PartialFC) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """(rank that they are for, rows), of all shares that this rank is to give."""
        shards = [Shard.of(head.shard.num_classes, rank, self._world.size) for rank in range(self._world.size)]
        for old, holder in enumerate(self._found.holder_W):
            if holder != self._world.rank or self._commit is None:
                continue
            for part in self._commit.shares[old].parts:
                for rank, shard in enumerate(shards):
                    low, high = max(part.start, shard.start), min(part.stop, shard.stop)
                    if low < high:
                        for frame in cut(part, low, high):
                            yield rank, frame

    def _rounds(
        self, frames: Iterator[tuple[int, dict[str, Tensor]]], head: PartialFC
    ) -> Iterator[list[dict[str, Tensor]]]:
        """Sends the frames of all ranks to where they belong; what has come for this one, round by round."""
        world, left = self._world, True
        while True:
            kept: list[dict[str, Tensor]] = []
            boxes: list[list[bytes]] = [[] for _ in range(world.size)]
            num_bytes = 0
            while left and num_bytes < PIECE_BYTES:
                rank, frame = next(frames, (-1, {}))
                left = rank >= 0
                if rank == world.rank:
                    kept.append(frame)
                elif left:
                    data = save(frame)
                    boxes[rank] += [len(data).to_bytes(8, "little"), data]
                num_bytes += sum(t.numel() * t.element_size() for t in frame.values())
            go = b"".join(data for box in boxes for data in box)
            size_W = torch.tensor([[sum(map(len, box)) for box in boxes] + [int(left)]])
            size_WW = world.all_gather(size_W, name="recover/sizes")
            payload = torch.frombuffer(bytearray(go), dtype=torch.uint8) if go else torch.empty(0, dtype=torch.uint8)
            come_W = size_WW[:, world.rank].tolist()
            come = world.start_all_to_all(payload, size_W[0, :-1].tolist(), come_W, name="recover/rows").wait()
            yield [*kept, *_unpacked(bytes(come.numpy().data))]
            if not size_WW[:, -1].any():
                return

    def _load_hard_negatives(self, head: PartialFC) -> list[str]:
        if head.hard_negatives is None:
            return []
        if not self._same_size:
            head.hard_negatives.clear()
            return [
                f"the lists of hard negatives start empty: {self.folder} is of {len(self._found.holder_W)} ranks, this "
                f"world has {self._world.size}"
            ]
        for old, holder in enumerate(self._found.holder_W):
            given = self._commit.shares[old].hard_negatives if self._has(old) and self._commit else None
            lists = self._spread(given, holder)
            if old == self._world.rank:
                head.hard_negatives.load_state(lists)
        return []

    # ---- what is of one rank

    @property
    def _same_size(self) -> bool:
        return len(self._found.holder_W) == self._world.size

    def _has(self, old: int) -> bool:
        return self._found.holder_W[old] == self._world.rank

    def _own_below(self, prefix: str) -> dict[str, Tensor]:
        of_ranks = [self._of_rank(rank, prefix) for rank in range(self._world.size)]
        return of_ranks[self._world.rank]

    def _of_rank(self, old: int, prefix: str) -> dict[str, Tensor]:
        own = self._commit.shares[old].own if self._has(old) and self._commit else {}
        given = {name.removeprefix(prefix): t for name, t in own.items() if name.startswith(prefix)}
        return self._spread(given, self._found.holder_W[old])

    def _spread(self, tensors: dict[str, Tensor] | None, root: int) -> dict[str, Tensor]:
        return spread(tensors, root, self._world, "recover/spread")


def cut(part: Part, low: int, high: int) -> Iterator[dict[str, Tensor]]:
    """The rows of classes [low, high) in frames of at most PIECE_BYTES (or one class): together they name each class
    of that range once."""
    begin, end = low - part.start, high - part.start
    made = part.rows.get("class")
    if made is not None:
        begin, end = torch.searchsorted(made, torch.tensor((low, high))).tolist()
    row_bytes = sum(t[:1].numel() * t.element_size() for t in part.rows.values())
    most = max(1, PIECE_BYTES // max(1, row_bytes))
    for first in range(begin, end, most) if begin < end else (begin,):
        last = min(first + most, end)
        frame = {name: t[first:last].contiguous() for name, t in part.rows.items()}
        stop = high
        if last < end:
            stop = int(made[last]) if made is not None else part.start + last
        frame[_RANGE] = torch.tensor((low, stop))
        yield frame
        low = stop


def _unpacked(data: bytes) -> Iterator[dict[str, Tensor]]:
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield load(data[at + 8 : at + 8 + size])
        at += 8 + size
