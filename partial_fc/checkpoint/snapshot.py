"""What a rank had after an update: taken at once, written or kept while training goes on."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from partial_fc.checkpoint import rows as head_rows
from partial_fc.checkpoint.checksums import sums_name, write_sums
from partial_fc.checkpoint.files import save_tensors, write, write_json
from partial_fc.checkpoint.rows import Part
from partial_fc.comm import World
from partial_fc.head import PartialFC

FORMAT = 4


@dataclass
class Snapshot:
    """One rank's share of the state after `step` updates, as tensors on the CPU."""

    rank: int
    world_size: int
    step: int
    manifest: dict[str, Any]
    backbone: dict[str, Tensor]  # equal on all ranks, like the optimiser's state
    optimizer: dict[str, Tensor]
    own: dict[str, Tensor]  # what only this rank has: running statistics, residuals of a compression
    parts: Iterable[Part] = ()  # of the head; where they are no copy, made as they are written
    hard_negatives: dict[str, Tensor] = field(default_factory=dict)
    class_names: list[str] | None = None
    is_copy: bool = True

    @property
    def num_bytes(self) -> int:
        """That a copy keeps."""
        tables = (self.backbone, self.optimizer, self.own, self.hard_negatives)
        held = sum(t.numel() * t.element_size() for table in tables for t in table.values())
        return held + (sum(part.num_bytes for part in self.parts) if self.is_copy else 0)

    def write(self, folder: Path, leads: bool) -> int:
        """Writes this rank's files, the checksums last; returns their bytes. leads: also what is equal on all ranks.
        Raises OSError, having removed what was written."""
        folder.mkdir(parents=True, exist_ok=True)
        self.remove(folder, leads)  # of an earlier try at this step, which may have cut other ranges
        try:
            sums = dict(self._write_files(folder, leads))
            write_sums(sums, folder / sums_name(self.rank, self.world_size))
        except BaseException:
            self.remove(folder, leads)
            raise
        return sum((folder / name).stat().st_size for name in sums)

    def _write_files(self, folder: Path, leads: bool) -> Iterator[tuple[str, str]]:
        """(name, SHA-256) of each."""
        rank, size = self.rank, self.world_size
        for part in self.parts:
            name = head_rows.file_name(rank, size, part.start, part.stop)
            yield name, save_tensors(part.rows, folder / name)
        for name, tensors in (
            (own_name(rank, size), self.own),
            (head_rows.hard_negatives_name(rank, size), self.hard_negatives),
        ):
            if tensors:
                yield name, save_tensors(tensors, folder / name)
        if not leads:
            return
        for name, tensors in (
            ("backbone.safetensors", self.backbone),
            ("optimizer.safetensors", self.optimizer),
        ):
            yield name, save_tensors(tensors, folder / name)
        if self.class_names is not None:
            yield "class-names.txt", write(folder / "class-names.txt", _lines(self.class_names))
        yield "manifest.json", write_json(self.manifest, folder / "manifest.json")

    def remove(self, folder: Path, leads: bool) -> None:
        """Removes this rank's files, also those of a try that did not end."""
        mine = f"-{self.rank:05d}-of-{self.world_size:05d}"
        names = [f"head{mine}-*", f"rank{mine}.*"]
        if leads:
            names += ["backbone.safetensors*", "optimizer.safetensors*", "class-names.txt*", "manifest.json*"]
        for name in names:
            for path in folder.glob(name):
                path.unlink(missing_ok=True)
        for path in folder.glob("*-of-*") if leads else ():
            if f"-of-{self.world_size:05d}" not in path.name:  # of a try by another number of ranks
                path.unlink(missing_ok=True)


def take(
    step: int,
    backbone: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    own: dict[str, Tensor],
    head: PartialFC,
    facts: Mapping[str, Any],
    *,
    world: World,
    class_names: list[str] | None = None,
    copy: bool = True,
) -> Snapshot:
    """The state as it is. own: `copied` already. facts: what else is to be found again, as JSON (position, best scores,
    configuration). copy: also the head's rows into memory of their own, so that training may go on; else to be written
    before it does."""
    parts = head_rows.parts(head, copy) if head.rows else []
    return Snapshot(
        world.rank,
        world.size,
        step,
        {
            "format": FORMAT,
            "step": step,
            "world_size": world.size,
            **(head_rows.facts(head) if head.rows else {}),
            **facts,
        },
        dict(backbone),
        dict(optimizer),
        own,
        list(parts) if copy else parts,
        copied(head.hard_negatives.state()) if head.rows and head.hard_negatives else {},
        class_names,
        copy,
    )


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In memory of their own, on the CPU."""
    return {name: head_rows.copied(t.detach()) for name, t in tensors.items()}


def own_name(rank: int, world_size: int) -> str:
    """The file of what only this rank has."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def _lines(names: list[str]) -> Iterator[bytes]:
    for begin in range(0, len(names), 10_000):
        yield "".join(f"{name}\n" for name in names[begin : begin + 10_000]).encode()
