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
from partial_fc.findings import Finding, Severity, counted, findings_at

_FOLDS = 10


def check_pairs(
    path: Path, num_threads: int, images: bool, trained_hash: NDArray[np.uint64], bar: bool
) -> tuple[list[Finding], int]:
    """Checks a verification set. Returns (findings, images scanned). trained_hash: of the training images, sorted."""
    file = str(path)
    try:
        pairs = read_pairs(path)
    except (ValueError, OSError) as error:
        return [Finding("error", "pairs-unreadable", str(error), file=file)], 0
    findings = _check_answers(pairs.same, file)
    if not images:
        return findings, 0
    scan = scan_images(pairs.images.__getitem__, len(pairs.images), num_threads, bar=path.name if bar else "")

    def describe(image: int) -> Mapping[str, Any]:
        return {"pair": image // 2, "image": image, "same": bool(pairs.same[image // 2])}

    # Pair lists repeat images: repetitions are reported by pairs only.
    hash_N, scan.hash_N = scan.hash_N, np.zeros_like(scan.hash_N)
    about_images = check_images(scan, np.zeros(len(pairs.images), np.int64), describe, file, embedding=True)
    findings += about_images + _check_repetitions(hash_N, pairs.same, file)
    if len(trained_hash):
        at = np.minimum(np.searchsorted(trained_hash, hash_N), len(trained_hash) - 1)
        what = "images are also in the training set, byte for byte: the accuracy does not hold for unseen images"
        trained = (trained_hash[at] == hash_N) & (hash_N != 0)
        findings += findings_at("warning", "pairs-trained-on", what, trained, describe, file)
    return findings, len(pairs.images)


def _check_answers(same_P: NDArray[np.bool_], file: str) -> list[Finding]:
    num_pairs, num_same = len(same_P), int(same_P.sum())
    counts = f"{counted(num_pairs, 'pair')}, {num_same:,} of them of one class"
    findings = [Finding("info", "pairs-count", counts, file=file)]
    if num_same in (0, num_pairs):
        what = f"{counts}: with one kind of pair every embedding scores 100 %"
        return [*findings, Finding("error", "pairs-one-answer", what, file=file)]
    if not 0.4 <= num_same / num_pairs <= 0.6:
        what = f"{counts}; half is usual: a constant answer scores more than 60 %"
        findings.append(Finding("warning", "pairs-balance", what, file=file))
    folds = np.array_split(same_P, min(_FOLDS, num_pairs))
    one_answer = np.array([fold.all() or not fold.any() for fold in folds])
    what = (
        f"{one_answer.sum()} of {len(folds)} folds have one kind of pair: mix the pairs within each fold (docs/data.md)"
    )
    findings += findings_at("warning", "pairs-folds", what, one_answer, lambda fold: {"fold": fold}, file)
    if num_pairs % _FOLDS:
        what = f"{counted(num_pairs, 'pair')}: not a multiple of {_FOLDS} folds"
        findings.append(Finding("info", "pairs-folds-uneven", what, file=file))
    return findings


def _check_repetitions(hash_N: NDArray[np.uint64], same_P: NDArray[np.bool_], file: str) -> list[Finding]:
    hash_P2 = hash_N.reshape(-1, 2)
    readable = (hash_P2 != 0).all(axis=1)
    identical = readable & (hash_P2[:, 0] == hash_P2[:, 1])
    findings: list[Finding] = []

    def add(severity: Severity, key: str, what: str, which: NDArray[np.bool_]) -> None:
        findings.extend(findings_at(severity, key, what, which, lambda pair: {"pair": pair}, file))

    add("error", "pairs-contradict", "pairs of the same image twice are marked as two classes", identical & ~same_P)
    add("warning", "pairs-identical", "pairs of one class consist of the same image twice", identical & same_P)
    # The order within a pair does not matter.
    _, first, of_pair = np.unique(np.sort(hash_P2, axis=1), axis=0, return_index=True, return_inverse=True)
    first_P = first[of_pair.ravel()]  # NumPy 2.0 gives of_pair a second axis
    again = readable & (first_P != np.arange(len(first_P)))
    add("warning", "pairs-again", "pairs occur more than once", again & ~identical)
    add("error", "pairs-two-answers", "pairs occur again with the other answer", again & (same_P != same_P[first_P]))
    return findings
