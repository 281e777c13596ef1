"""Starting from class centres alone: those of a checkpoint, or of another trainer's files that were imported."""

from pathlib import Path

from partial_fc.checkpoint import rows as head_rows
from partial_fc.checkpoint.consistency import agreed
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.tools.checkpoint_on_disk import has_head, part_files, step_folder
from partial_fc.comm import World
from partial_fc.head import PartialFC


def open_centres(folder: Path, world: World) -> Checkpoint:
    """folder: a checkpoint, or one whose newest counts. Raises ValueError, on all ranks, where one finds none with a
    head, or another step than the others. A collective."""

    def opened() -> Checkpoint:
        found = Checkpoint(step_folder(folder))
        if not has_head(found.manifest, str(found.folder)):
            raise ValueError(f"{found.folder} has no class centres: it is not of recipe face")
        return found

    found = agreed(opened, "give --head-centres the folder of one step", world)
    assert found is not None
    return found


def load_centres(found: Checkpoint, head: PartialFC) -> None:
    """Gives the head the centres of its class range and nothing else: their optimiser starts anew. Raises ValueError
    where they are of another head, or a file is missing or damaged."""
    now = head_rows.facts(head)
    for fact in ("num_classes", "embedding_size", "sub_centres"):
        if found.manifest[fact] != now[fact]:
            raise ValueError(
                f"{found.folder} has {fact} {found.manifest[fact]}; this run has {now[fact]}. (Other classes: "
                "`partial-fc checkpoint classes`)"
            )
    shard, reached = head.shard, head.shard.start
    for file in sorted(part_files(found.folder, found.manifest["world_size"]), key=lambda file: file.start):
        low, high = max(shard.start, file.start), min(shard.stop, file.stop)
        if low >= high or low != reached:
            continue
        found.sums.check(file.path)
        class_M = file.made(low, high).nonzero().squeeze(1) + low
        centres = file.tensors["centres"].index_select(0, file.places(class_M))
        nothing = {name: t.new_zeros(1).expand(len(class_M), *t.shape[1:]) for name, t in head.row_state().items()}
        head.load_classes(low, high, class_M, {**nothing, "centres": centres})
        reached = high
    if reached != shard.stop:
        raise ValueError(f"{found.folder}: no file holds class {reached}, of which this rank needs the centre")


def check_whole(found: Checkpoint) -> None:
    """Raises ValueError for a checkpoint that holds centres alone: nothing can go on from it."""
    name = "backbone.safetensors"
    if not (found.folder / name).exists() and found.sums[name] is None:
        raise ValueError(
            f"{found.folder} holds class centres without a backbone: start with --head-centres {found.folder} and "
            "--pretrained instead of --resume"
        )
