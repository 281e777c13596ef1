"""first_batch.png: the network's inputs, cropped and augmented, each with its label and key."""

from partial_fc import pictures
from partial_fc.accessories import spare
from partial_fc.data import Batch
from partial_fc.data.labels import NONE
from partial_fc.train.job import Job

NUM_TILES, ACROSS = 24, 8


def write(job: Job, batch: Batch) -> None:
    """Draws rank 0's first batch in this process, ACROSS in a row; nothing for samples that are no images."""
    if job.world.rank == 0:
        spare(f"{job.models_root / 'first_batch.png'}", _draw, job, batch)


def _draw(job: Job, batch: Batch) -> None:
    names, tiles = job.class_names, []
    label_BK = batch.label_B.reshape(len(batch.key_B), -1).tolist()
    for data, label_K, key in zip(batch.input_B[:NUM_TILES], label_BK, batch.key_B.tolist(), strict=False):
        picture = job.backbone.to_input.picture(data)
        if picture is not None:
            classes = [str(names[label] if names else label) for label in label_K if label != NONE]
            title = ", ".join(classes) if names else f"class {' '.join(classes)}"
            tiles.append(pictures.Tile(pictures.fit(picture.numpy()), [title, f"record {key}"]))
    if tiles:
        pictures.write(job.models_root / "first_batch.png", pictures.sheet([pictures.Row("", tiles)], ACROSS))
