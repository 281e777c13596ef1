"""`partial-fc checkpoint merge` and `reshard`: the files of W ranks become those of another number."""

from collections.abc import Iterator

from partial_fc.checkpoint.head_state import hard_negatives_name, tables_in
from partial_fc.checkpoint.output import Output, new_checkpoint, print_notes
from partial_fc.checkpoint.read import Checkpoint, open_with_centres
from partial_fc.checkpoint.snapshot import below, local_name
from partial_fc.verbs.checkpoint.options import MergeOptions, ReshardOptions


def merge(options: MergeOptions) -> None:
    reshard(ReshardOptions(options.folders, options.out, world_size=1))


def reshard(options: ReshardOptions) -> None:
    """Raises ValueError where a file is missing or damaged, or the folders are not of one checkpoint."""
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


def copy_other_files(stored: Checkpoint, output: Output, same_classes: bool = True) -> Iterator[str]:
    """Writes all but the head's rows; yields what is left out or becomes something else."""
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
