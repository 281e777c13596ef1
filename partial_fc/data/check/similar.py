"""Finds labels that contradict one another, in embeddings of a training set: vectors unlike the others of their class,
and classes that may be one under two numbers.

N embeddings, C classes, D numbers, Q classes that are looked at, each beside the one with the nearest mean.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc import terminal
from partial_fc.data.check.images import blocks_of
from partial_fc.data.vectors import Vectors
from partial_fc.findings import Describe, Finding, Severity, findings_at

MOST = 2048  # classes looked at, or as many as PRODUCTS allow
PRODUCTS = 1 << 38  # multiplications: some seconds, and all of 16,000 classes of 1,024 numbers
FAR = 75  # degrees from the mean of the class: what Sub-center ArcFace (Deng et al., 2020) drops
MANY_FAR = 0.01  # of the vectors: a warning
FEW = 0.05  # of the classes: of characters that were all different 3 % look alike; more are a warning
ALIKE = 0.95  # docs/data.md: of classes that are one over 99 % are above it, of others 3 %
_COSINES = 1 << 24  # at once
_PAIRS = 10  # of images, with the mean cosine of all classes, that each class has beside its own

_Floats = NDArray[np.float64]


def check_similar(
    parts: Sequence[Vectors],
    label_N: NDArray[np.int64],
    describe: Describe,
    file: str,
    names: Sequence[str] = (),
    bar: str = "",
) -> list[Finding]:
    """Tells which vectors are FAR from the mean of their class, and which share of the classes looks like another one,
    with the pairs: an image of the one and an image of the other are nearly as alike as two images of one class.

    The mean cosine of images of the two has to be ALIKE of that of different images in one of the two, both beyond the
    mean cosine of images of any two classes: a bound for any network. What is far from its class does not count there.

    label_N: -1 is none. names: of the classes. bar: the name of a progress bar, if any."""
    class_C, place_N = np.unique(label_N, return_inverse=True)
    sum_CD, count_C = np.zeros((len(class_C), parts[0].width), np.float32), np.zeros(len(class_C))
    cosine_N = np.full(len(label_N), np.nan, np.float32)
    for at, row_BD in _blocks(parts, f"{bar}: means" if bar else ""):
        _add(sum_CD, count_C, place_N[at], row_BD, np.isfinite(row_BD).all(axis=1) & (label_N[at] >= 0), 1)
    length_C = np.sqrt(np.einsum("cd,cd->c", sum_CD, sum_CD, dtype=np.float64))
    for at, row_BD in _blocks(parts, f"{bar}: distances" if bar else ""):
        length_B = np.where(length_C > 0, length_C, 1)[place_N[at]]
        cosine_N[at] = np.einsum("bd,bd->b", row_BD, sum_CD[place_N[at]]) / length_B
    far_N = (cosine_N < np.cos(np.deg2rad(FAR))) & (label_N >= 0)
    for at, row_BD in _blocks(parts, f"{bar}: means" if bar else "") if far_N.any() else ():
        _add(sum_CD, count_C, place_N[at], row_BD, far_N[at], -1)
    far = np.flatnonzero(far_N)
    what = (
        f"{len(far) / max(1, len(label_N)):.1%} of the vectors are more than {FAR} degrees from the mean of their "
        "class: their labels may be wrong (docs/data.md)"
    )
    severity: Severity = "warning" if len(far) >= MANY_FAR * len(label_N) else "info"
    found = findings_at(severity, "vectors-far", what, far[np.argsort(cosine_N[far], kind="stable")], describe, file)
    return found + _similar_classes(sum_CD, count_C, class_C, file, names, bar)


def _similar_classes(
    sum_CD: NDArray[np.float32], count_C: _Floats, class_C: NDArray[np.int64], file: str, names: Sequence[str], bar: str
) -> list[Finding]:
    """sum_CD: of the vectors of each class, count_C of them; is changed."""
    # All cosines in a class add up to the square of the sum's length; one for each vector is that with itself.
    length_C = np.sqrt(np.einsum("cd,cd->c", sum_CD, sum_CD, dtype=np.float64))
    pairs_C, within_C = count_C * (count_C - 1), np.square(length_C) - count_C
    pooled = within_C.sum() / max(1, pairs_C.sum())
    together = np.square(sum_CD.sum(axis=0, dtype=np.float64)).sum() - np.square(length_C).sum()
    elsewhere = together / max(1, count_C.sum() ** 2 - np.square(count_C).sum())
    there = np.flatnonzero((count_C > 0) & (length_C > 0))
    sum_CD /= np.where(length_C > 0, length_C, 1)[:, None].astype(np.float32)
    most = max(MOST, PRODUCTS // max(1, sum_CD.size))
    looked_Q = np.sort(np.random.default_rng(0).choice(there, min(most, len(there)), replace=False))
    cosine_Q, near_Q = _nearest(sum_CD, there, looked_Q, bar)
    between_Q = cosine_Q * (length_C[looked_Q] / count_C[looked_Q]) * (length_C[near_Q] / count_C[near_Q])
    num_Q = pairs_C[looked_Q] + pairs_C[near_Q] + _PAIRS
    within_Q = (within_C[looked_Q] + within_C[near_Q] + _PAIRS * pooled) / num_Q
    excess_Q = between_Q - elsewhere - ALIKE * (within_Q - elsewhere)
    similar = np.flatnonzero((excess_Q > 0) & (pairs_C.sum() > 0))
    similar = similar[np.argsort(-excess_Q[similar], kind="stable")]

    def named(place: int) -> str:
        number = int(class_C[place])
        return f"{number} ({names[number]})" if number < len(names) else str(number)

    def describe(i: int) -> Mapping[str, Any]:
        cosines = f"{between_Q[i]:.3f} between, {within_Q[i]:.3f} within"
        return {"class": named(looked_Q[i]), "like": named(near_Q[i]), "mean cosine": cosines}

    share = len(similar) / max(1, len(looked_Q))
    what = (
        f"{share:.1%} of {len(looked_Q):,} classes looked at are like another one: images of the two are as alike as "
        "images of one"
    )
    severity: Severity = "info" if share < FEW else "warning"
    if severity == "warning":
        what += (
            ". Look at some of them, and give two that are one the same name, or set --interclass-filtering-threshold "
            "0.4 (docs/data.md)"
        )
    return [Finding(severity, "classes-similar", what, len(similar), similar, describe, file)]


def _add(
    sum_CD: NDArray[np.float32],
    count_C: _Floats,
    place_B: NDArray[np.int64],
    row_BD: NDArray[np.float32],
    which_B: NDArray[np.bool_],
    sign: int,
) -> None:
    import torch

    place, row = torch.from_numpy(place_B[which_B]), torch.from_numpy(row_BD[which_B])
    torch.from_numpy(sum_CD).index_add_(0, place, row, alpha=sign)
    count_C += sign * np.bincount(place, minlength=len(count_C))


def _nearest(
    unit_CD: NDArray[np.float32], there: NDArray[np.int64], looked_Q: NDArray[np.int64], bar: str
) -> tuple[_Floats, NDArray[np.int64]]:
    """Returns cosine and place of the nearest other row of `there` for each row that is looked at."""
    cosine_Q, near_Q = np.full(len(looked_Q), -np.inf), np.zeros(len(looked_Q), np.int64)
    at_once = max(1, _COSINES // max(1, len(looked_Q)))
    with terminal.bar(total=len(there), unit="class", desc=f"{bar}: nearest", shown=bool(bar)) as progress:
        for first in range(0, len(there), at_once):
            at_M = there[first : first + at_once]
            cosine_QM = unit_CD[looked_Q] @ unit_CD[at_M].T
            cosine_QM[looked_Q[:, None] == at_M] = -np.inf
            best_Q = cosine_QM.argmax(axis=1)
            found_Q = cosine_QM[np.arange(len(looked_Q)), best_Q]
            near_Q = np.where(found_Q > cosine_Q, at_M[best_Q], near_Q)
            cosine_Q = np.maximum(found_Q, cosine_Q)
            progress.update(len(at_M))
    return cosine_Q, near_Q


def _blocks(parts: Sequence[Vectors], bar: str) -> Iterator[tuple[slice, NDArray[np.float32]]]:
    return ((at, row_BD.astype(np.float32, copy=False)) for at, row_BD in blocks_of(parts, bar))
