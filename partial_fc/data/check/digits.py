"""Check of MNIST's idx files for what their reader accepts but no digit should have. N images of H x W pixels."""

from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from partial_fc.data.check.contact_sheet import ContactSheet
from partial_fc.data.check.images import check_images, scan_images
from partial_fc.data.check.labels import check_labels
from partial_fc.data.idx import Split, find, read_set
from partial_fc.findings import Finding, findings_at

_CLASSES = 10


def check_digits(folder: Path, sheet: ContactSheet) -> tuple[list[Finding], int]:
    """Checks both sets and adds their images to `sheet`. Returns (findings, images scanned)."""
    findings: list[Finding] = []
    hashes: dict[Split, NDArray[np.uint64]] = {}
    splits: tuple[Split, Split] = ("train", "t10k")
    for split in splits:
        try:
            file = find(folder, split)[0]
            images = read_set(folder, split, _CLASSES)
        except (ValueError, OSError) as error:
            findings.append(Finding("error", "idx-unreadable", str(error), file=str(folder)))
            continue
        pixel_NHW1 = images.image_NHW[..., None]
        scan = scan_images(pixel_NHW1.__getitem__, len(pixel_NHW1), 1)
        hashes[split] = scan.hash_N

        def describe(i: int, label_N: NDArray[np.int64] = images.label_N) -> dict[str, int]:
            return {"image": i, "class": int(label_N[i])}

        def as_file(i: int, image_NHW: NDArray[np.uint8] = images.image_NHW) -> bytes:
            return cv2.imencode(".png", image_NHW[i])[1].tobytes()

        about_images = check_images(scan, images.label_N, describe, str(file))
        findings += check_labels(images.label_N, _CLASSES, describe, str(file)) + about_images
        sheet.add(about_images, as_file, len(images.label_N), describe, file.name)
    if len(hashes) == 2:
        what = "images of the test set are also in the training set, pixel for pixel"
        both = np.isin(hashes["t10k"], hashes["train"])
        name = str(find(folder, "t10k")[0])
        findings += findings_at("warning", "pairs-trained-on", what, both, lambda i: {"image": i}, name)
    return findings, sum(map(len, hashes.values()))
