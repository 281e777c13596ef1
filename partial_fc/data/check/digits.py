"""MNIST's idx files: what their reader does not refuse, but no digit should be.

N images of H x W pixels.
"""

import hashlib
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from partial_fc.data.check.contact_sheet import Sheet
from partial_fc.data.check.image_findings import judge_images
from partial_fc.data.check.images import CONSTANT, Looks
from partial_fc.data.check.labels import judge_labels
from partial_fc.data.idx import ImageSet, Split, find, read_set
from partial_fc.findings import Finding

_CLASSES = 10


def judge_digits(folder: Path, sheet: Sheet) -> tuple[list[Finding], int]:
    """(findings about both sets, images looked at). sheet: is given the suspicious images."""
    found: list[Finding] = []
    hashes: dict[Split, NDArray[np.uint64]] = {}
    looked = 0
    splits: tuple[Split, Split] = ("train", "t10k")
    for split in splits:
        try:
            file = str(find(folder, split)[0])
            images = read_set(folder, split, _CLASSES)
        except (ValueError, OSError) as error:
            found.append(Finding("error", "idx-unreadable", str(error), file=str(folder)))
            continue
        looks = _looks(images)
        looked += len(images.label_N)
        hashes[split] = looks.hash_N

        def describe(i: int, label_N: NDArray[np.int64] = images.label_N) -> dict[str, int]:
            return {"image": i, "class": int(label_N[i])}

        def as_file(i: int, image_NHW: NDArray[np.uint8] = images.image_NHW) -> bytes:
            return cv2.imencode(".png", image_NHW[i])[1].tobytes()

        found += judge_labels(images.label_N, _CLASSES, describe, file)
        about_images = judge_images(looks, images.label_N, describe, file)
        found += about_images
        sheet.add(about_images, as_file)
    if len(hashes) == 2:
        both = np.flatnonzero(np.isin(hashes["t10k"], hashes["train"]))
        if len(both):
            what = "images of the test set are also trained on, pixel for pixel"
            file = str(find(folder, "t10k")[0])
            found.append(Finding("warning", "pairs-trained-on", what, len(both), both, lambda i: {"image": i}, file))
    return found, looked


def _looks(images: ImageSet) -> Looks:
    looks = Looks.of(len(images.label_N))
    looks.height_N[:], looks.width_N[:] = images.image_NHW.shape[1:]
    flat_NX = images.image_NHW.reshape(len(looks.code_N), -1)
    looks.code_N[flat_NX.min(axis=1) == flat_NX.max(axis=1)] = CONSTANT
    for i, row in enumerate(flat_NX):
        looks.hash_N[i] = max(1, int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little"))
    return looks
