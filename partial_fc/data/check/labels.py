"""Checks of labels and class folders: out of range, gaps, class sizes. N samples, C classes."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.image_folder import ImageFolder
from partial_fc.data.labels import NONE, in_array
from partial_fc.data.sample import BadRecord, Source
from partial_fc.findings import Describe, Finding, Severity, counted, findings_at

UNREAD = -(2**62)  # marks a label that was not read
_MOST_CLASSES = 1 << 27  # for which images are counted per class
_FEW_CLASSES = 10
_MANY_TIMES = 100  # a class with this many times the images of the median class is reported


def check_labels(
    label_N: NDArray[np.int64],
    num_classes: int,
    describe: Describe,
    file: str = "",
    *,
    names: Sequence[str] = (),
    embedding: bool = False,
    unit: str = "image",
) -> list[Finding]:
    """Checks the labels of all samples that have one, (N,), or (N, K) as `Source.labels` has them. describe(i) names
    sample i. names: of the classes, as far as known. embedding: recipe face trains on them, for which a few classes are
    too few. unit: what a sample is called."""
    if label_N.ndim > 1:
        sample_L, _ = real = (label_N != NONE).nonzero()
        each = label_N[real]
        return check_labels(
            each, num_classes, lambda i: {**describe(int(sample_L[i])), "class": int(each[i])}, file,
            names=names, embedding=embedding, unit=unit,
        )  # fmt: skip
    if not len(label_N):
        return _check_classes(np.zeros(0, np.int64), file, names, unit)
    findings = check_range(label_N, num_classes, describe, file, unit)
    if num_classes > _MOST_CLASSES:
        largest = int(label_N.max())
        wrong = "it is wrong" if largest + 1 == num_classes else "the number of classes is wrong"
        what = f"{num_classes:,} classes for {counted(len(label_N), unit)}; the largest label is {largest:,}: {wrong}"
        return [*findings, Finding("error", "class-number", what, 1, [int(label_N.argmax())], describe, file)]
    inside = (label_N >= 0) & (label_N < num_classes)
    count_C = np.bincount(label_N if inside.all() else label_N[inside], minlength=num_classes)
    num_used = int((count_C > 0).sum())
    if embedding and 1 < num_used < _FEW_CLASSES:
        what = (
            f"classes have {unit}s, fewer than {_FEW_CLASSES}: an embedding trained on so few classes generalises "
            "poorly to others"
        )
        findings += findings_at("warning", "class-few", what, count_C > 0, _describe(count_C, names, unit), file)
    return findings + check_class_number(num_classes, file, unit, names) + _check_classes(count_C, file, names, unit)


def check_class_number(
    num_classes: int, file: str = "", unit: str = "image", names: Sequence[str] = ()
) -> list[Finding]:
    """Reports a single class as an error, without reading labels."""
    if num_classes != 1:
        return []
    why = "every label is 0: give the real ones"
    if names:
        why = f"it is called {names[0]}" + (" (expected ROOT/CLASS/IMAGE)" if unit == "image" else "")
    what = f"all {unit}s are of one class, so there is nothing to learn, and the loss is 0 from the start; {why}"
    return [Finding("error", "class-only-one", what, file=file)]


def check_range(
    label_N: NDArray[np.int64], num_classes: int, describe: Describe, file: str = "", unit: str = "image"
) -> list[Finding]:
    """Reports labels outside [0, num_classes); a sample of the labels suffices."""
    low, high = (int(label_N.min()), int(label_N.max())) if len(label_N) else (0, 0)
    hint = f"; they need {high + 1} classes"
    if high < num_classes:
        hint = "; leave out what has no class"
    elif (low, high) == (1, num_classes):
        hint = "; they count from 1, classes count from 0"
    what = (
        f"labels outside 0 to {num_classes - 1} (smallest {low}, largest {high}): their {unit}s would be in no "
        f"class{hint}"
    )
    outside = (label_N < 0) | (label_N >= num_classes)
    return findings_at("error", "label-range", what, outside, describe, file)


def _describe(count_C: NDArray[np.int64], names: Sequence[str], unit: str) -> Describe:
    """Returns a function that names a class. count_C: images of each class."""

    def describe(label: int) -> Mapping[str, Any]:
        name = {"name": names[label]} if label < len(names) else {}
        return {"class": label, **name, f"{unit}s": int(count_C[label])}

    return describe


def _check_classes(count_C: NDArray[np.int64], file: str, names: Sequence[str], unit: str) -> list[Finding]:
    describe = _describe(count_C, names, unit)

    def add(severity: Severity, key: str, what: str, which: NDArray[np.bool_]) -> None:
        findings.extend(findings_at(severity, key, what, which, describe, file))

    used = np.flatnonzero(count_C)
    if not len(used):
        return [Finding("error", "label-none", f"no {unit} has a label of any class", file=file)]
    findings: list[Finding] = []
    label_C, num_images = np.arange(len(count_C)), int(count_C.sum())
    if len(count_C) > 1 and len(used) == 1 and num_images > 1:
        others = counted(len(count_C) - 1, "class")
        what = f"one class has all {num_images:,} {unit}s, {others} have none: have the real labels been lost?"
        add("error", "label-constant", what, count_C > 0)
    named = label_C < len(names)
    emptied = " (an empty folder, or one whose files are all left out)" if unit == "image" else ""
    what = (
        f"classes have a name but no {unit}{emptied}: the head keeps a centre for each. Remove them, or check which "
        f"{unit}s are left out"
    )
    add("warning", "class-empty", what, (count_C == 0) & named)
    what = (
        f"classes have no {unit}; the largest label is {used[-1]}: is the number of classes, {len(count_C)}, that of "
        "another set?"
    )
    add("warning", "class-unused", what, (count_C == 0) & ~named)
    what = f"classes with a single {unit}: nothing is learned about their variation"
    add("warning", "class-one-image", what, count_C == 1)
    if len(used) > 1:
        median = float(np.median(count_C[used]))
        what = (
            f"classes with more than {_MANY_TIMES} times the {unit}s of the median class ({median:g}), or more than "
            f"half of all: are these unsorted {unit}s?"
        )
        huge = (count_C > _MANY_TIMES * median) | ((count_C > num_images / 2) & (len(used) > 2))
        add("warning", "class-huge", what, huge)
    return findings


def check_folders(source: Source, file: str = "") -> list[Finding]:
    """Reports ignored files of a class-folder set; else nothing."""
    if not isinstance(source, ImageFolder):
        return []
    paths = [path for paths in source.left_out.values() for path in paths]
    what = f"files are left out: {source.left_out_text()}"
    which = np.arange(len(paths))
    return findings_at("warning", "files-left-out", what, which, lambda i: {"file": str(source.root / paths[i])}, file)


def labels_of(source: Source) -> NDArray[np.int64] | None:
    """Returns the labels as `Source.labels` does; UNREAD for damaged records. Raises LabelOutOfRange as that does."""
    num_labels = source.num_labels
    try:
        label_N = source.labels()
        return None if label_N is None else np.ascontiguousarray(label_N)
    except BadRecord:
        label_N = np.full(len(source) if num_labels == 1 else (len(source), num_labels), UNREAD)
    for index in range(len(source)):
        with suppress(BadRecord):  # the loader names that record and replaces it
            label_N[index] = in_array(source.read(index), num_labels)
    return label_N
