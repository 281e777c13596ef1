"""Several labels of a sample: at most K, its source's num_labels; in arrays NONE stands where a sample has fewer.

N samples, M labels at most in a file.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.sample import LabelOutOfRange, Sample, Source

NONE = -1
WRONG = -(2**61)  # LabelOutOfRange.label of a sample with no label, with too many, or with one that is no whole number
KEYS = ("label", "labels", "class", "cls", "identity")  # of the label in a table or a .json; the first counts
MAX_LABEL = 2**53  # labels are read as floats, exact up to here


def of_sample(raw: Any, source: Source, index: int) -> tuple[int, tuple[int, ...]]:
    """Returns (label, further labels) of a sample. raw: numbers as the file has them, (M,), or one. Raises
    LabelOutOfRange if there are several and one is no class, and as `listed`."""
    if source.num_labels == 1:
        return int(raw), ()
    first, *more = listed(raw, source, index)
    for label in (first, *more):
        if not 0 <= label < source.num_classes:
            raise LabelOutOfRange(
                f"{source.where(index)}: label {label}; expected 0 to {source.num_classes - 1}", label
            )
    return first, tuple(more)


def listed(raw: NDArray[Any], source: Source, index: int) -> list[int]:
    """Returns the numbers, (M,), as labels, whatever the classes are. Raises LabelOutOfRange with the label WRONG for
    no label, more than num_labels, and what is no whole number."""
    labels = [number for number in raw.tolist() if number != NONE]
    problem = f"{len(labels)} labels; expected 1 to {source.num_labels} (--labels)"
    if 0 < len(labels) <= source.num_labels:
        odd = [number for number in labels if not (float(number).is_integer() and abs(number) <= MAX_LABEL)]
        if not odd:
            return [int(number) for number in labels]
        problem = f"label {odd[0]}; expected a class number"
    raise LabelOutOfRange(f"{source.where(index)}: {problem}", WRONG)


def as_int64(label: NDArray[Any], where: object) -> NDArray[np.int64]:
    """Returns a file's labels as int64. Raises LabelOutOfRange for one that is larger."""
    if label.dtype == np.uint64 and label.size and (largest := int(label.max())) >= 2**63:
        raise LabelOutOfRange(f"{where}: label {largest}; expected a class number", WRONG)
    return label.astype(np.int64)


def of_file(label: NDArray[Any], source: Source) -> NDArray[np.int64]:
    """Returns the labels of a whole file as `Source.labels` does. label: integers, (N,), or (N, M) with NONE where a
    sample has fewer. Raises as `listed`."""
    label, most = as_int64(label, getattr(source, "path", "a label")), source.num_labels
    if most == 1:
        return first(label)
    label_NM = label.reshape(len(label), -1)
    real_NM = label_NM != NONE
    count_N = real_NM.sum(axis=1)
    wrong_N = (count_N < 1) | (count_N > most)
    if wrong_N.any():
        listed(label_NM[wrong_N.argmax()], source, int(wrong_N.argmax()))
    if not real_NM[:, 0].all() or real_NM[:, most:].any():
        label_NM = np.take_along_axis(label_NM, np.argsort(~real_NM, axis=1, kind="stable"), axis=1)
    label_NM = label_NM[:, :most]
    return np.pad(label_NM, ((0, 0), (0, most - label_NM.shape[1])), constant_values=NONE)


def check_inside(label: NDArray[np.int64], source: Source, what: str = "label") -> None:
    """Raises LabelOutOfRange for the first of the labels, as `Source.labels` returns them, that is no class."""
    outside = (label < 0) | (label >= source.num_classes)
    if source.num_labels > 1:
        outside &= label != NONE
    if outside.any():
        at = int(outside.argmax())
        index, number = at // source.num_labels, int(label.flat[at])
        raise LabelOutOfRange(
            f"{source.where(index)}: {what} {number}; expected 0 to {source.num_classes - 1} ({int(outside.sum()):,} "
            f"such of {len(source):,})", number,
        )  # fmt: skip


def in_rows(label_V: NDArray[np.int64], count_N: NDArray[Any]) -> NDArray[np.int64]:
    """Returns labels that stand one after the other as (N, M). count_N: how many of them each sample has."""
    label_NM = np.full((len(count_N), max(1, int(count_N.max()))), NONE, np.int64)
    label_NM[np.arange(label_NM.shape[1]) < count_N[:, None]] = label_V
    return label_NM


def first(label: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the first label of each sample, (N,). label: as `Source.labels` returns them."""
    return label if label.ndim == 1 else label[:, 0]


def in_array(sample: Sample, num_labels: int) -> Any:
    """Returns the label of a sample, or with num_labels K > 1 its labels, int64 (K,)."""
    if num_labels == 1:
        return sample.label
    row_K = np.full(num_labels, NONE, np.int64)
    row_K[: 1 + len(sample.more)] = (sample.label, *sample.more)
    return row_K
