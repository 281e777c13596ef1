"""first_batch.png: what the network gets to see, cropped and augmented as it is, with the labels in a file beside."""

import json
import math

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from partial_fc.data import Batch
from partial_fc.files import replacing
from partial_fc.train.job import Job
from partial_fc.train.record.log import warn_on_os_error

NUM_TILES, ACROSS, SIDE = 24, 8, 112  # pixels


def write(job: Job, batch: Batch) -> None:
    """Of rank 0's first batch in this process: tiles without words, ACROSS in a row, and first_batch.json with the
    label, class name and key of each. Nothing of samples that are no pictures."""
    if job.world.rank != 0:
        return
    pictures = [job.backbone.to_input.picture(data) for data in batch.input_B[:NUM_TILES]]
    tiles = [tile(picture) for picture in pictures if picture is not None]
    if not tiles:
        return
    tiles += [np.zeros_like(tiles[0])] * (-len(tiles) % min(ACROSS, len(tiles)))
    across = min(ACROSS, len(tiles))
    picture = np.concatenate([np.concatenate(tiles[i : i + across], axis=1) for i in range(0, len(tiles), across)])
    names = job.class_names
    rows = [
        {"label": label, "name": names[label] if names else None, "key": key}
        for label, key in zip(batch.label_B[:NUM_TILES].tolist(), batch.key_B[:NUM_TILES].tolist(), strict=True)
    ]
    with warn_on_os_error(f"a picture below {job.models_root}"):
        done, encoded = cv2.imencode(".png", picture)
        assert done
        with replacing(job.models_root / "first_batch.png") as partial:
            partial.write_bytes(encoded.tobytes())
        with replacing(job.models_root / "first_batch.json") as partial:
            partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def tile(picture: torch.Tensor) -> NDArray[np.uint8]:
    """(H, W, C) as (SIDE, SIDE, 3) BGR."""
    pixels = picture.numpy()
    if pixels.dtype != np.uint8:  # an engine of its own scale
        low, high = float(pixels.min()), float(pixels.max())
        pixels = ((pixels - low) * (255 / (high - low or 1.0))).astype(np.uint8)
    scale = SIDE / max(pixels.shape[:2])
    size = tuple(max(1, math.floor(n * scale)) for n in pixels.shape[1::-1])
    pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_NEAREST)
    code = cv2.COLOR_GRAY2BGR if pixels.ndim == 2 else cv2.COLOR_RGB2BGR
    shown = np.zeros((SIDE, SIDE, 3), np.uint8)
    shown[: size[1], : size[0]] = cv2.cvtColor(pixels, code)
    return shown
