"""`partial-fc checkpoint merge` and `reshard`: convert the files of W ranks to another number of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from partial_fc.flags.numbers import PROCESSES, check_numbers

if TYPE_CHECKING:
    from partial_fc.checkpoint.output import Output
    from partial_fc.checkpoint.read import Checkpoint


@dataclass(frozen=True)
class MergeOptions:
    """One set of files, as one process would have written it. (Training needs none of this: any number of ranks loads
    what any other wrote.)"""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """A checkpoint, or a folder whose newest counts; several where each host has written into a folder of its own."""
    out: Path
    """The new checkpoint's folder; --resume takes it."""


@dataclass(frozen=True)
class ReshardOptions(MergeOptions):
    """The files that another number of ranks would have written, bit for bit the same rows: for hosts that each have
    a folder of their own, or to join those folders (with the number of ranks that they are from)."""

    world_size: int
    """Ranks that the new files are for."""

    def __post_init__(self) -> None:
        check_numbers(self, world_size=PROCESSES)


def merge(options: MergeOptions) -> None:
    reshard(ReshardOptions(options.folders, options.out, world_size=1))


def reshard(options: ReshardOptions) -> None:
    """Writes the new files. Raises ValueError for a missing or damaged file, or folders of different checkpoints."""
    from partial_fc.checkpoint.head_state import tables_in
    from partial_fc.checkpoint.output import new_checkpoint, print_notes
    from partial_fc.checkpoint.read import open_with_centres

    size = options.world_size
    stored = open_with_centres(*options.folders, named=True)
    tables = tables_in(stored.manifest, stored.where)
    made_by = f"written anew for {size} rank(s), from {stored.world_size} ({stored.where})"
    manifest = {**stored.manifest, "world_size": size}
    with new_checkpoint(options.out, manifest, stored.class_names, made_by) as output:
        for name in tables:
            output.rows(stored.rows(table=name), name)
        print_notes(copy_other_files(stored, output))
    counts = ", ".join(f"{f'{name}: ' if name else ''}{facts['num_classes']} classes" for name, facts in tables.items())
    print(f"{options.out}: step {stored.step}, {counts}, {size} rank(s)")


def copy_other_files(stored: "Checkpoint", output: "Output", same_classes: bool = True) -> Iterator[str]:
    """Writes all but the head's rows; yields notes on omitted or converted files."""
    from partial_fc.checkpoint.head_state import hard_negatives_name, tables_in
    from partial_fc.checkpoint.snapshot import below, local_name

    for name in ("backbone.safetensors", "optimizer.safetensors"):
        output.tensors(name, stored.load(name))
    before, size = stored.world_size, output.world_size
    local = [stored.local(rank) for rank in range(before)]
    if before != size:
        residuals = stored.merged_exchange(size)
        if residuals:
            yield "the residuals of gradient compression are joined: each rank has an equal part of their sum"
        if any(below("buffer/", tensors) for tensors in local):
            yield "the ranks' own running statistics are left out; the backbone holds those of all ranks together"
        local = [{f"exchange/{name}": t for name, t in residuals.items()}] * size
    for rank, tensors in enumerate(local):
        if tensors:
            output.tensors(local_name(rank, size), tensors, rank)
    for table, facts in tables_in(output.manifest, str(output.folder)).items():
        for rank in range(before):
            name = hard_negatives_name(table, rank, before)
            lists = stored.load(name, optional=True)
            if lists and (before != size or not same_classes):
                yield "lists of hard negatives are for the same ranks with the same classes: left out, they grow anew"
                facts["hard_negatives"] = 0
                break
            if lists:
                output.tensors(name, lists, rank)
