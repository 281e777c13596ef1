"""first_batch.png: the network's inputs, cropped and augmented, with the labels in a JSON file."""

import json

import numpy as np
import torch
from numpy.typing import NDArray

from partial_fc import pictures
from partial_fc.data import Batch
from partial_fc.files import replacing, warn_on_os_error
from partial_fc.train.job import Job

NUM_TILES, ACROSS = 24, 8


def write(job: Job, batch: Batch) -> None:
    """Writes rank 0's first batch in this process: tiles, ACROSS in a row, and first_batch.json with the label, class
    name and key of each. Nothing for samples that are no images."""
    if job.world.rank != 0:
        return
    shown = [job.backbone.to_input.picture(data) for data in batch.input_B[:NUM_TILES]]
    tiles = [tile(picture) for picture in shown if picture is not None]
    if not tiles:
        return
    names = job.class_names
    rows = [
        {"label": label, "name": names[label] if names else None, "key": key}
        for label, key in zip(batch.label_B[:NUM_TILES].tolist(), batch.key_B[:NUM_TILES].tolist(), strict=True)
    ]
    with warn_on_os_error(f"a picture below {job.models_root}"):
        pictures.write(job.models_root / "first_batch.png", pictures.grid(tiles, min(ACROSS, len(tiles))))
        with replacing(job.models_root / "first_batch.json") as partial:
            partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def tile(picture: torch.Tensor) -> NDArray[np.uint8]:
    """Returns a tile of (H, W, C)."""
    pixels = picture.numpy()
    if pixels.dtype != np.uint8:  # an engine with its own scale
        low, high = float(pixels.min()), float(pixels.max())
        pixels = ((pixels - low) * (255 / (high - low or 1.0))).astype(np.uint8)
    return pictures.fit(pixels)
