"""A rank's share of the state after an update, copied at once, then written or kept during training."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from partial_fc.checkpoint import rows as stored
from partial_fc.checkpoint.files import checksums_name, save_tensors, write_checksums, write_json, write_lines
from partial_fc.checkpoint.folders import MANIFEST
from partial_fc.checkpoint.head_state import FORMAT, facts_of, hard_negatives_name
from partial_fc.checkpoint.rows import Part, class_bytes, cut
from partial_fc.comm import World
from partial_fc.head.protocol import Head
from partial_fc.head.rows.class_rows import ClassRows, CopiedRows
from partial_fc.memory import available_memory_bytes, give_back_freed, refusals

# The fraction of free memory for a part that is read while training waits (of rows that are no views), and its minimum.
_PART_SHARE, _LEAST_PART_BYTES = 1 / 16, 8 << 20
REMEDY = "More processes or hosts have less each"
_log = logging.getLogger("partial_fc")


@dataclass
class TableShare:
    """A rank's share of a table of class centres."""

    # If the snapshot is no copy, the rows are cut as they are written.
    parts: Iterable[Part] = ()
    hard_negatives: dict[str, Tensor] = field(default_factory=dict)
    # The parts, if they are still to be copied.
    copying: CopiedRows | None = None


@dataclass
class Snapshot:
    """A rank's share of the state after `step` updates, as tensors on the CPU."""

    rank: int
    world_size: int
    step: int
    manifest: dict[str, Any]
    # Equal on all ranks, like the optimizer's state.
    backbone: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    # Of this rank alone: running statistics.
    local: dict[str, Tensor]
    # The head's tables by name.
    tables: dict[str, TableShare] = field(default_factory=dict)
    class_names: list[str] | None = None
    # Else the tensors above are views.
    is_copy: bool = True

    def write(self, folder: Path, leads: bool, check: Callable[[], object] = lambda: None) -> int:
        """Writes this rank's files, the checksums last; returns their bytes. leads: also the replicated state. check:
        called before each is removed or written, as a rank that was cut off may find others' files of this step. Raises
        OSError, having removed what was written, MemoryError, and what check raises."""
        for share in self.tables.values():
            if share.copying is not None:
                share.copying.finish()
        folder.mkdir(parents=True, exist_ok=True)
        self.remove(folder, leads, check)  # of an earlier try at this step, possibly with other ranges
        try:
            checksums = dict(self._write_files(folder, leads, check))
            check()
            write_checksums(checksums, folder / checksums_name(self.rank, self.world_size))
        except BaseException:
            with contextlib.suppress(OSError):  # the first failure is reported
                self.remove(folder, leads, check)
            raise
        return sum((folder / name).stat().st_size for name in checksums)

    def _write_files(self, folder: Path, leads: bool, check: Callable[[], object]) -> Iterator[tuple[str, str]]:
        """Writes the files; yields the name and SHA-256 of each."""
        rank, size = self.rank, self.world_size
        for table, share in self.tables.items():
            for part in share.parts:
                check()
                name = stored.file_name(table, rank, size, part.start, part.stop)
                yield name, save_tensors(part.tensors, folder / name)
        files = {local_name(rank, size): self.local}
        files |= {hard_negatives_name(table, rank, size): share.hard_negatives for table, share in self.tables.items()}
        files = {name: tensors for name, tensors in files.items() if tensors}
        if leads:
            files |= {"backbone.safetensors": self.backbone, "optimizer.safetensors": self.optimizer}
        for name, tensors in files.items():
            check()
            yield name, save_tensors(tensors, folder / name)
        check()
        if leads and self.class_names is not None:
            yield "class-names.txt", write_lines(self.class_names, folder / "class-names.txt")
        if leads:
            yield MANIFEST, write_json(self.manifest, folder / MANIFEST)

    def remove(self, folder: Path, leads: bool, check: Callable[[], object] = lambda: None) -> None:
        """Removes this rank's files, also those of an incomplete try. check: called before each."""
        mine = f"-{self.rank:05d}-of-{self.world_size:05d}"
        names = [f"head*{mine}-*", f"rank{mine}.*"]
        if leads:
            names += ["backbone.safetensors*", "optimizer.safetensors*", "class-names.txt*", "manifest.json*"]
        for name in names:
            for path in folder.glob(name):
                check()
                path.unlink(missing_ok=True)
        for path in folder.glob("*-of-*") if leads else ():
            if f"-of-{self.world_size:05d}" not in path.name:  # of a try by another number of ranks
                check()
                path.unlink(missing_ok=True)


def capture(
    step: int,
    backbone: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    local: Mapping[str, Tensor],
    head: Head,
    facts: Mapping[str, Any],
    *,
    world: World,
    class_names: list[str] | None = None,
    copy: bool | Callable[[int], bool] = True,
    behind: bool = False,
) -> Snapshot:
    """Captures the state. Raises MemoryError.

    backbone, optimizer, local: as in a Snapshot, no copies
    facts: for the manifest, as JSON: position, best scores, configuration
    copy: whether tensors are copied, so that training may go on before the snapshot is written; a function decides by
        the number of bytes. Without a copy, or memory for one, training waits until it is written.
    behind: rows are copied while the snapshot is written, where that is possible, with the changes made since
    """
    tables = head.tables()
    lists = {name: table.hard_negatives.state() for name, table in tables.items() if table.hard_negatives}
    tensors = dict(backbone), dict(optimizer), dict(local)
    num_bytes = sum(t.nbytes for each in (*tensors, *lists.values()) for t in each.values())
    for rows in (table.rows for table in tables.values()):
        num_bytes += int(rows.created(rows.start, rows.stop).sum()) * class_bytes(rows)
    is_copy = copy if isinstance(copy, bool) else copy(num_bytes)

    def take(is_copy: bool) -> Snapshot:
        if not is_copy:  # memory may be short; what is written also passes through the page cache
            give_back_freed()
        copying = {name: t.rows.begin_copy() if is_copy and behind else None for name, t in tables.items()}
        weights, state, own = (copied(each) if is_copy else each for each in tensors)
        shares = {}
        for name, table in tables.items():
            parts = _parts(table.rows, copying[name], is_copy, world.local_size)
            near = lists.get(name, {})
            shares[name] = TableShare(parts, copied(near) if is_copy else near, copying[name])
        manifest = {"format": FORMAT, "step": step, "world_size": world.size, **facts_of(head), **facts}
        return Snapshot(world.rank, world.size, step, manifest, weights, state, own, shares, class_names, is_copy)

    problem = None
    try:
        with refusals():
            taken = take(is_copy)
    except MemoryError as error:
        problem = f"no memory for a copy of this rank's {num_bytes / 1e6:,.1f} MB: {error}"
    # (The copies so far are freed.)
    if problem is not None:
        if not is_copy:
            raise MemoryError(problem)
        _log.warning(f"training pauses while the checkpoint of step {step} is written: {problem}. {REMEDY}")
        taken = take(False)
    return taken


def _parts(rows: ClassRows, copying: CopiedRows | None, copy: bool, local_size: int) -> Iterable[Part]:
    if copying is not None:
        return list(cut(copying, copying.start, copying.stop))
    if copy:
        return list(cut(rows, rows.start, rows.stop, copy=True))
    most_bytes = max(_LEAST_PART_BYTES, int(_PART_SHARE * available_memory_bytes()) // local_size)
    return cut(rows, rows.start, rows.stop, min(stored.PART_BYTES, most_bytes))


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of the tensors, on the CPU."""
    return {name: stored.copied(t.detach()) for name, t in tensors.items()}


def local_name(rank: int, world_size: int) -> str:
    """Returns the name of the file with the state of this rank alone."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def buffers_in(local: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the running statistics in the state of a rank alone."""
    return {name.removeprefix("buffer/"): t for name, t in local.items() if name.startswith("buffer/")}
