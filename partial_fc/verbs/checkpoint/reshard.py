"""`partial-fc checkpoint reshard`: converts the files of W ranks to another number of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from partial_fc.flags.facts import PROCESSES, In

if TYPE_CHECKING:
    from partial_fc.checkpoint.output import Output
    from partial_fc.checkpoint.read import Checkpoint


@dataclass(frozen=True)
class ReshardOptions:
    """Writes the files of another number of ranks, with bit-identical rows: for hosts that each have their own folder,
    or to join such folders. (Training does not need it: any number of ranks loads the files of any other.)"""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """A checkpoint, or a folder of checkpoints, of which the newest is used; several if each host has its own
    folder."""
    out: Path
    """The folder of the new checkpoint, for --resume."""
    world_size: Annotated[int, In(PROCESSES)]
    """Number of ranks of the new files."""


def reshard(options: ReshardOptions) -> None:
    """Writes the new files. Raises ValueError for a missing or damaged file, or folders of different checkpoints."""
    from partial_fc.checkpoint.head_state import tables_in
    from partial_fc.checkpoint.output import new_checkpoint, print_notes
    from partial_fc.checkpoint.read import open_with_centres

    size = options.world_size
    stored = open_with_centres(*options.folders, named=True)
    tables = tables_in(stored.manifest, stored.where)
    made_by = f"resharded to {size} rank(s), from {stored.world_size} ({stored.where})"
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
    from partial_fc.checkpoint.snapshot import buffers_in, local_name

    for name in ("backbone.safetensors", "optimizer.safetensors"):
        output.tensors(name, stored.load(name))
    before, size = stored.world_size, output.world_size
    local = [stored.local(rank) for rank in range(before)]
    if before != size:
        if any(buffers_in(tensors) for tensors in local):
            yield "the ranks' own running statistics are left out; the backbone has those of all ranks"
        local = []
    for rank, tensors in enumerate(local):
        if tensors:
            output.tensors(local_name(rank, size), tensors, rank)
    for table, facts in tables_in(output.manifest, str(output.folder)).items():
        for rank in range(before):
            name = hard_negatives_name(table, rank, before)
            lists = stored.load(name, optional=True)
            if lists and (before != size or not same_classes):
                yield (
                    "lists of hard negatives fit only the same ranks and classes: they are left out, and training "
                    "rebuilds them"
                )
                facts["hard_negatives"] = 0
                break
            if lists:
                output.tensors(name, lists, rank)
