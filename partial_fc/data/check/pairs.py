"""Check of a verification set (.bin): are all images readable, and are the answers plausible?

P pairs; images 2 k and 2 k + 1 are pair k.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.check.images import check_images, scan_images
from partial_fc.data.pairs import read_pairs
from partial_fc.findings import Finding, counted, findings_at


def check_pairs(
    path: Path, num_threads: int, images: bool, trained_hash: NDArray[np.uint64], bar: bool
) -> tuple[list[Finding], int]:
    """Checks a verification set. Returns (findings, images scanned). trained_hash: of the training images, sorted."""
    file = str(path)
    try:
        pairs = read_pairs(path)
    except (ValueError, OSError) as error:
        return [Finding("error", "pairs-unreadable", str(error), file=file)], 0
    num_pairs, num_same = len(pairs.same), int(pairs.same.sum())
    counts = f"{counted(num_pairs, 'pair')}, {num_same:,} of them of one class"
    findings = [Finding("info", "pairs-count", counts, file=file)]
    if num_same in (0, num_pairs):
        what = f"{counts}: with one kind of pair every embedding scores 100 %"
        findings.append(Finding("error", "pairs-one-answer", what, file=file))
    if not images:
        return findings, 0
    scan = scan_images(pairs.images.__getitem__, len(pairs.images), num_threads, bar=path.name if bar else "")

    def describe(image: int) -> Mapping[str, Any]:
        return {"pair": image // 2, "image": image, "same": bool(pairs.same[image // 2])}

    # Pair lists repeat images: repetitions are no findings.
    hash_N, scan.hash_N = scan.hash_N, np.zeros_like(scan.hash_N)
    about_images = check_images(scan, np.zeros(len(pairs.images), np.int64), describe, file, embedding=True)
    findings += about_images
    if len(trained_hash):
        at = np.minimum(np.searchsorted(trained_hash, hash_N), len(trained_hash) - 1)
        what = "images are also in the training set, byte for byte: the accuracy does not hold for unseen images"
        trained = (trained_hash[at] == hash_N) & (hash_N != 0)
        findings += findings_at("warning", "pairs-trained-on", what, trained, describe, file)
    return findings, len(pairs.images)
