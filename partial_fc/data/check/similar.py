"""Finds classes that may be one under two numbers, in embeddings of a training set.

N embeddings, C classes, D numbers, Q classes that are looked at.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc import terminal
from partial_fc.data.vectors import BLOCK, Vectors
from partial_fc.findings import Finding

MOST = 2048  # classes looked at
_AT_ONCE = 8192  # classes that these are compared with


def check_similar(
    parts: Sequence[Vectors], label_N: NDArray[np.int64], file: str, names: Sequence[str] = (), bar: str = ""
) -> list[Finding]:
    """Tells which share of the classes has another one with nearly the same mean embedding, and names the pairs.

    label_N: -1 is none. names: of the classes. bar: the name of a progress bar, if any."""
    import torch

    from partial_fc.head.telemetry import SIMILAR

    class_C, place_N = np.unique(label_N, return_inverse=True)
    mean_CD = np.zeros((len(class_C), parts[0].width), np.float32)
    with terminal.bar(total=len(label_N), unit="vector", desc=f"{bar}: means", shown=bool(bar)) as progress:
        start = 0
        for row_BD in _blocks(parts):
            place_B = torch.from_numpy(place_N[start : start + len(row_BD)])
            torch.from_numpy(mean_CD).index_add_(0, place_B, torch.from_numpy(np.nan_to_num(row_BD)))
            start += len(row_BD)
            progress.update(len(row_BD))
    mean_CD[class_C < 0] = 0
    length_C = np.linalg.norm(mean_CD, axis=1, keepdims=True)
    mean_CD /= np.where(length_C > 0, length_C, 1)
    there = np.flatnonzero(length_C[:, 0] > 0)
    looked_Q = np.sort(np.random.default_rng(0).choice(there, min(MOST, len(there)), replace=False))
    cosine_Q, near_Q = np.full(len(looked_Q), -np.inf), np.zeros(len(looked_Q), np.int64)
    with terminal.bar(total=len(class_C), unit="class", desc=f"{bar}: nearest", shown=bool(bar)) as progress:
        for first in range(0, len(class_C), _AT_ONCE):
            cosine_QM = mean_CD[looked_Q] @ mean_CD[first : first + _AT_ONCE].T
            own = (looked_Q >= first) & (looked_Q < first + _AT_ONCE)
            cosine_QM[own, looked_Q[own] - first] = -np.inf
            best_Q = cosine_QM.argmax(axis=1)
            found_Q = cosine_QM[np.arange(len(looked_Q)), best_Q]
            near_Q = np.where(found_Q > cosine_Q, first + best_Q, near_Q)
            cosine_Q = np.maximum(found_Q, cosine_Q)
            progress.update(cosine_QM.shape[1])
    similar = np.flatnonzero(cosine_Q > SIMILAR)
    similar = similar[np.argsort(-cosine_Q[similar], kind="stable")]

    def named(place: int) -> str:
        number = int(class_C[place])
        return f"{number} ({names[number]})" if number < len(names) else str(number)

    def describe(i: int) -> Mapping[str, Any]:
        return {"class": named(looked_Q[i]), "like": named(near_Q[i]), "cosine": f"{cosine_Q[i]:.3f}"}

    what = (
        f"of {len(looked_Q):,} classes looked at, {len(similar) / max(1, len(looked_Q)):.1%} have another one's mean "
        f"at a cosine above {SIMILAR}: they may be one"
    )
    return [Finding("info", "classes-similar", what, len(similar), similar, describe, file)]


def _blocks(parts: Sequence[Vectors]) -> Iterator[NDArray[np.float32]]:
    for part in parts:
        for first in range(0, len(part), BLOCK):
            yield np.asarray(part.row_ND[first : first + BLOCK], np.float32)
