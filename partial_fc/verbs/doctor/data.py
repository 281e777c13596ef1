"""`partial-fc doctor data`: checks a training or verification set before a run."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc import findings as report
from partial_fc.data.check.images import check_images, check_vectors, scan_images, unreadable
from partial_fc.data.check.labels import UNREAD, check_folders, check_labels, labels_of
from partial_fc.data.check.pairs import check_pairs
from partial_fc.data.image_folder import ImageFolder, class_folders, image_names
from partial_fc.data.labels import NONE, first
from partial_fc.data.open import is_database
from partial_fc.data.recordio import RecordSource
from partial_fc.data.sample import BadRecord, LabelOutOfRange, still
from partial_fc.data.sets.joined import is_pattern, open_sets, tables_of
from partial_fc.data.sets.ranges import as_url
from partial_fc.findings import Describe, Finding, counted
from partial_fc.flags.facts import CLASSES, THREADS, In

_NOTHING_TO_CHECK = 2
_EXPECTED = "a folder with train.rec, a .rec file, a folder of class folders, a list of images, or a .bin"
_KINDS: dict[type, str] = {RecordSource: "RecordIO", ImageFolder: "class folders, or a list"}


@dataclass(frozen=True)
class DataOptions:
    """Checks index, headers, labels and every image of a set, and of the .bin files beside it. Exit status 0: no
    errors; 1: errors; 2: nothing to check."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A folder with train.rec, a .rec file, a folder with one sub-folder per class, a list, tar shards, a .parquet,
    vectors (.npz, .npy, .parquet), a database of images, a pattern or .sets file of several, or a .bin."""
    num_classes: Annotated[int | None, In(CLASSES)] = None
    """The number of classes of the training run; by default what the set states."""
    labels: Annotated[int, In("[1, 1000]")] = 1
    """--labels of the training run. 1: the first label of each image is checked; K: up to K of each."""
    images: bool = True
    """Decode every image and look for equal files; without it only index, headers and labels are read."""
    num_workers: Annotated[int, In(THREADS)] = len(os.sched_getaffinity(0))
    """Threads that decode."""
    show: int = 10
    """Places to print for each finding."""
    report: Path | None = None
    """A JSON file to write: every finding with all its places."""
    bar: bool = True
    """Show a progress bar."""


def doctor_data(options: DataOptions) -> int:
    """Prints the findings and returns the exit status."""
    report.check_writable(options.report)
    started, source = time.perf_counter(), options.source
    is_set, bins = _parts(source)
    if not is_set and not bins:
        found = f"{source} holds none of these:" if source.exists() else f"{source} not found; expected"
        print(f"partial-fc doctor data: {found} {_EXPECTED}")
        return _NOTHING_TO_CHECK
    findings, num_read, hash_N = _check_set(options) if is_set else ([], 0, np.empty(0, np.uint64))
    for path in bins:
        found_there, num_decoded = check_pairs(path, options.num_workers, options.images, hash_N, options.bar)
        findings += found_there
        num_read += num_decoded
    seconds = time.perf_counter() - started
    report.print_all(findings, options.show)
    num_errors, num_warnings = report.count(findings, "error"), report.count(findings, "warning")
    read = f"{num_read:,} read in {seconds:.1f} s, {num_read / seconds:,.0f}/s"
    print(f"\n{counted(num_errors, 'error')}, {counted(num_warnings, 'warning')}; {read}")
    if options.report:
        summary = {"source": str(source), "read": num_read, "errors": num_errors, "warnings": num_warnings}
        report.write_report(options.report, summary, findings)
        print(f"all places: {options.report}")
    return int(num_errors > 0)


def _parts(source: Path) -> tuple[bool, list[Path]]:
    """Tells whether there is a set at a path, or several; and returns the .bin files there."""
    if is_pattern(source) or as_url(source) is not None:
        return True, []
    if source.suffix == ".bin" or not source.exists():
        return False, [source] if source.exists() else []
    folder = source if source.is_dir() else source.parent if source.suffix == ".rec" else None
    bins = sorted(folder.glob("*.bin")) if folder else []
    is_set = not source.is_dir() or (source / "train.rec").exists() or is_database(source)
    return bool(is_set or class_folders(source) or (not bins and image_names(source))), bins


def _check_set(options: DataOptions) -> tuple[list[Finding], int, NDArray[np.uint64]]:
    """Checks the set at a path, or the sets of a pattern or .sets file together. Returns the findings, the number of
    images or vectors that were read, and the sorted hashes of the images."""
    source, file, no_hash_N = options.source, str(options.source), np.empty(0, np.uint64)
    try:
        joined = open_sets([source], vectors=True, num_labels=options.labels)
        label_N = labels_of(joined)
        assert label_N is not None
    except (ValueError, OSError) as error:
        key = "label-range" if isinstance(error, LabelOutOfRange) else "set-unreadable"
        return [Finding("error", key, str(error), file=file)], 0, no_hash_N
    vectors, label_of_N = tables_of(joined), first(label_N)

    def read(i: int) -> bytes | NDArray[np.uint8]:
        try:
            return still(joined.read(i))
        except LabelOutOfRange as error:
            raise BadRecord(str(error)) from error

    def describe(i: int) -> Mapping[str, Any]:
        label = int(label_of_N[i])
        return {"file": joined.where(i), **({} if label == UNREAD else {"class": label})}

    names, num_classes = joined.class_names() or (), options.num_classes or joined.num_classes
    kind, unit = ("vectors", "vector") if vectors else (_KINDS.get(type(joined), "set"), "image")
    print(f"{source}: {kind}, {counted(len(label_N), unit)}, {counted(num_classes, 'class')}")
    findings = check_folders(joined, file) + _check_labels(label_N, num_classes, describe, file, names, unit)
    bar = source.name if options.bar else ""
    if not options.images:
        unread = [] if vectors else unreadable(np.flatnonzero(label_of_N == UNREAD), read, describe, file)
        return findings + unread, 0, no_hash_N
    if vectors:
        return findings + check_vectors(vectors, label_of_N, describe, file, bar), len(label_N), no_hash_N
    height, width = (isinstance(joined, RecordSource) and joined.image_size) or (0, 0)
    scan = scan_images(read, len(label_N), options.num_workers, bar=bar)
    size = height if height == width > 0 else None
    findings += check_images(scan, label_of_N, describe, file, size, embedding=True)
    return findings, len(label_N), np.sort(scan.hash_N)


def _check_labels(
    label_N: NDArray[np.int64], num_classes: int, describe: Describe, file: str, names: Sequence[str], unit: str
) -> list[Finding]:
    findings = []
    if label_N.ndim > 1:
        count_N = (label_N != NONE).sum(axis=1)
        what = f"{count_N.min()} to {count_N.max()} labels each, {count_N.mean():.3g} on average"
        findings.append(Finding("info", "labels", what, int(count_N.sum()), file=file))
    has_label = first(label_N) != UNREAD  # the others have their own finding
    labelled: NDArray[np.int64] | range = range(len(label_N)) if has_label.all() else np.flatnonzero(has_label)
    return findings + check_labels(
        label_N if has_label.all() else label_N[has_label],
        num_classes,
        lambda i: describe(int(labelled[i])),
        file,
        names=names,
        embedding=True,
        unit=unit,
    )
