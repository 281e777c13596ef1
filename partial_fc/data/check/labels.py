"""What labels say about a training set: out of range, gaps, classes of one image or of nearly all.

N samples, C classes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.record_source import MAX_CLASSES
from partial_fc.findings import Describe, Finding

_MOST_CLASSES = 1 << 27  # counted one by one
_MANY_TIMES = 100  # a class of more times as many images as the median class is reported


def judge_labels(label_N: NDArray[np.int64], num_classes: int, describe: Describe, file: str = "") -> list[Finding]:
    """label_N: of all samples that have one. describe(i) names sample i."""
    if not len(label_N):
        return judge_classes(np.zeros(0, np.int64), file)
    found = []
    outside = np.flatnonzero((label_N < 0) | (label_N >= num_classes))
    if len(outside):
        found.append(
            Finding(
                "error",
                "label-range",
                f"labels outside 0 to {num_classes - 1} (smallest {label_N.min()}, largest {label_N.max()}): their "
                f"images would be in no class{_hint(label_N, num_classes)}",
                len(outside),
                outside,
                describe,
                file,
            )
        )
    if num_classes > _MOST_CLASSES:
        largest = int(label_N.argmax())
        what = f"{num_classes:,} classes for {len(label_N):,} images: is the largest label wrong?"
        return [*found, Finding("error", "class-number", what, 1, [largest], describe, file)]
    count_C = np.bincount(label_N[(label_N >= 0) & (label_N < num_classes)], minlength=num_classes)
    return found + judge_classes(count_C, file)


def judge_classes(count_C: NDArray[np.int64], file: str = "") -> list[Finding]:
    """count_C: images of each class."""

    def describe(label: int) -> Mapping[str, Any]:
        return {"class": label, "images": int(count_C[label])}

    def finding(severity, key: str, what: str, classes: NDArray[np.int64]) -> list[Finding]:
        return [Finding(severity, key, what, len(classes), classes, describe, file)] if len(classes) else []

    used = np.flatnonzero(count_C)
    if not len(used):
        return [Finding("error", "label-none", "no image has a label of any class", file=file)]
    found = []
    if len(count_C) > 1 and len(used) == 1 and count_C.sum() > 1:
        found += finding(
            "error",
            "label-constant",
            f"class has all {count_C.sum():,} images, {len(count_C) - 1} classes have none: were the labels lost?",
            used,
        )
    if len(count_C) > MAX_CLASSES:
        what = f"classes; labels in a .rec are float32, exact up to {MAX_CLASSES:,} only"
        found.append(Finding("warning", "label-float32", what, len(count_C), file=file))
    empty = np.flatnonzero(count_C == 0)
    gaps, beyond = empty[empty < used[-1]], empty[empty > used[-1]]
    found += finding(
        "warning", "class-gap", "numbers below the largest label that no image has: classes of nobody", gaps
    )
    found += finding(
        "warning",
        "class-unused",
        f"classes above the largest label, {used[-1]}, that no image has: is the number of classes, {len(count_C)}, "
        "that of another set?",
        beyond,
    )
    found += finding(
        "warning",
        "class-one-image",
        "classes with one image: it attracts nothing of its kind",
        np.flatnonzero(count_C == 1),
    )
    median, half = float(np.median(count_C[used])), count_C.sum() / 2
    if len(used) > 1:
        large = (count_C > _MANY_TIMES * median) | ((count_C > half) & (len(used) > 2))
        found += finding(
            "warning",
            "class-huge",
            f"classes with more than {_MANY_TIMES} times the images of the median class ({median:g}), or more than "
            "half of all: a bin for what could not be told apart?",
            np.flatnonzero(large),
        )
    return found


def _hint(label_N: NDArray[np.int64], num_classes: int) -> str:
    if label_N.min() == 1 and label_N.max() == num_classes:
        return ". Do they count from 1? Classes count from 0"
    return f"; is the number of classes, {num_classes}, that of another set?"
