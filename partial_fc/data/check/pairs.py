"""A verification set (.bin): can every image be read, and do the answers make sense?

P pairs; images 2 k and 2 k + 1 are pair k.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.check.contact_sheet import Sheet
from partial_fc.data.check.image_findings import judge_images
from partial_fc.data.check.images import Looks, examine
from partial_fc.data.pairs import read_pairs
from partial_fc.findings import Finding

_FOLDS = 10


def judge_pairs(
    path: Path, num_threads: int, images: bool, known_hash: NDArray[np.uint64], bar: bool, sheet: Sheet
) -> tuple[list[Finding], int]:
    """(findings, images looked at). known_hash: of the images that are trained on, sorted. sheet: is given the
    suspicious images."""
    file = str(path)
    try:
        pairs = read_pairs(path)
    except (ValueError, OSError) as error:
        return [Finding("error", "pairs-unreadable", str(error), file=file)], 0
    found = _judge_answers(pairs.same, file)
    if not images:
        return found, 0
    looks = examine(
        pairs.images.__getitem__,
        len(pairs.images),
        num_threads,
        hear_decoder=True,
        bar=path.name if bar else "",
    )

    def describe(image: int) -> Mapping[str, Any]:
        return {"pair": image // 2, "image": image, "same": bool(pairs.same[image // 2])}

    # Lists of pairs name an image many times: repetitions are judged by pairs only.
    alone = Looks(looks.code_N, np.zeros_like(looks.hash_N), looks.height_N, looks.width_N, looks.coloured_N)
    alone.messages = looks.messages
    about_images = judge_images(alone, np.zeros(len(pairs.images), np.int64), describe, file)
    found += about_images
    sheet.add(about_images, pairs.images.__getitem__)
    found += _judge_hashes(looks.hash_N, pairs.same, describe, file)
    at = np.searchsorted(known_hash, looks.hash_N)
    trained = np.zeros(len(looks.hash_N), np.bool_)
    if len(known_hash):
        trained = (known_hash[np.minimum(at, len(known_hash) - 1)] == looks.hash_N) & (looks.hash_N != 0)
    if trained.any():
        places = np.flatnonzero(trained)
        what = "images are also trained on, byte for byte: the accuracy is not that on unseen ones"
        found.append(Finding("warning", "pairs-trained-on", what, len(places), places, describe, file))
    return found, len(pairs.images)


def _judge_answers(same_P: NDArray[np.bool_], file: str) -> list[Finding]:
    num_pairs, num_same = len(same_P), int(same_P.sum())
    said = f"{num_pairs:,} pairs, {num_same:,} of them of one class"
    found = [Finding("info", "pairs-count", said, file=file)]
    if num_same in (0, num_pairs):
        what = f"{said}: with one kind of answer any embedding is right"
        return [*found, Finding("error", "pairs-one-answer", what, file=file)]
    if not 0.4 <= num_same / num_pairs <= 0.6:
        what = f"{said}; usual is half: accuracy then says little, `always yes` or `always no` has more than 60 %"
        found.append(Finding("warning", "pairs-balance", what, file=file))
    folds = np.array_split(same_P, min(_FOLDS, num_pairs))
    lone = [number for number, fold in enumerate(folds) if fold.all() or not fold.any()]
    if lone:
        what = f"of {len(folds)} folds hold one kind of answer: pairs are to be mixed, fold after fold (docs/data.md)"
        found.append(Finding("warning", "pairs-folds", what, len(lone), lone, lambda fold: {"fold": fold}, file))
    if num_pairs % _FOLDS:
        found.append(
            Finding("info", "pairs-folds-uneven", f"{num_pairs:,} pairs are no multiple of 10 folds", file=file)
        )
    return found


def _judge_hashes(hash_N: NDArray[np.uint64], same_P: NDArray[np.bool_], describe, file: str) -> list[Finding]:
    hash_P2 = hash_N.reshape(-1, 2)
    readable = (hash_P2 != 0).all(axis=1)
    identical = readable & (hash_P2[:, 0] == hash_P2[:, 1])
    found = []

    def say(severity, key: str, what: str, which: NDArray[np.bool_]) -> None:
        pairs = np.flatnonzero(which)
        if len(pairs):
            found.append(Finding(severity, key, what, len(pairs), pairs, lambda pair: {"pair": pair}, file))

    say(
        "error",
        "pairs-contradict",
        "pairs of an image with itself are marked as two classes",
        identical & ~same_P,
    )
    say(
        "warning",
        "pairs-identical",
        "pairs of one class are an image with itself: no test",
        identical & same_P,
    )
    # Which of the two comes first makes no pair another one.
    ordered = np.sort(hash_P2, axis=1)
    _, first, of_pair, times = np.unique(ordered, axis=0, return_index=True, return_inverse=True, return_counts=True)
    again = readable & (times[of_pair] > 1) & (first[of_pair] != np.arange(len(ordered)))
    say("warning", "pairs-again", "pairs occur more than once", again & ~identical)
    other = again & (same_P != same_P[first[of_pair]])
    say("error", "pairs-two-answers", "pairs occur again with the other answer", other)
    return found
