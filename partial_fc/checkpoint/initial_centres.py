"""Starting from class centres alone: those of a checkpoint, or of another trainer's files that were imported."""

from pathlib import Path

from partial_fc.checkpoint.consistency import same_checkpoint
from partial_fc.checkpoint.head_state import check_same_head
from partial_fc.checkpoint.read import Checkpoint, open_with_centres
from partial_fc.checkpoint.rows import cut
from partial_fc.checkpoint.rows_now import rows_now
from partial_fc.comm import World
from partial_fc.head import PartialFC


def open_centres(folder: Path, world: World) -> Checkpoint:
    """folder: a checkpoint, or one whose newest counts. Raises ValueError, on all ranks, where one finds none with a
    head, or another step than the others. A collective."""

    def opened() -> Checkpoint:
        found = open_with_centres(folder)
        found.check_rows(world.rank, world.size)
        return found

    checkpoint = same_checkpoint(opened, "give --head-centres the folder of one step", world)
    assert checkpoint is not None
    return checkpoint


def load_centres(checkpoint: Checkpoint, head: PartialFC) -> None:
    """Gives the head the centres of its class range and nothing else: their optimizer starts anew. Raises ValueError
    where they are of another head, or a file is missing or damaged."""
    check_same_head(checkpoint.manifest, head, str(checkpoint.folder))
    for part in cut(rows_now(checkpoint, head.rows.start, head.rows.stop), head.rows.start, head.rows.stop):
        zeros = {
            name: part.tensors["centres"].new_zeros(1).expand(part.num_rows, *column.shape)
            for name, column in head.rows.columns.items()
        }
        head.rows.write(part.start, part.stop, part.class_N, {**zeros, "centres": part.tensors["centres"]})


def check_whole(checkpoint: Checkpoint) -> None:
    """Raises ValueError for a checkpoint that holds centres alone: nothing can go on from it."""
    if checkpoint.path("backbone.safetensors") is None:
        raise ValueError(
            f"{checkpoint.folder} holds class centres without a backbone: start with --head-centres "
            f"{checkpoint.folder} and --pretrained instead of --resume"
        )
