"""`partial-fc doctor data`: checks a training or verification set before a run."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc import findings as report
from partial_fc.data.check.images import check_images, check_vectors, scan_images, unreadable
from partial_fc.data.check.labels import UNREAD, check_folders, check_labels, labels_of
from partial_fc.data.check.pairs import check_pairs
from partial_fc.data.check.similar import check_similar
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


_KINDS: dict[type, str] = {RecordSource: "RecordIO", ImageFolder: "class folders, or a list"}


class CannotCheck(ValueError):
    """Nothing of this set can be checked."""


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


_EXPECTED = "a folder with train.rec, a .rec file, a folder of class folders, a list of images, or a .bin"


def doctor_data(options: DataOptions) -> int:
    """Prints the findings and returns the exit status."""
    report.check_writable(options.report)
    started = time.perf_counter()
    check = _Check(options)
    try:
        check.run()
    except CannotCheck as error:
        print(f"partial-fc doctor data: {error}")
        return _NOTHING_TO_CHECK
    seconds = time.perf_counter() - started
    report.print_all(check.findings, options.show)
    num_errors, num_warnings = report.count(check.findings, "error"), report.count(check.findings, "warning")
    decoded = f"{counted(check.num_decoded, check.unit)} {check.done} in {seconds:.1f} s"
    rate = f", {check.num_decoded / seconds:,.0f} {check.unit}s/s" if check.num_decoded else ""
    print(f"\n{counted(num_errors, 'error')}, {counted(num_warnings, 'warning')}; {decoded}{rate}")
    if options.report:
        summary = {
            "source": str(options.source),
            "kind": check.kind,
            "images": check.num_images,
            "classes": check.num_classes,
            "images_decoded": check.num_decoded,
            "seconds": round(seconds, 2),
            "errors": num_errors,
            "warnings": num_warnings,
        }
        report.write_report(options.report, summary, check.findings)
        print(f"all places: {options.report}")
    return int(num_errors > 0)


@dataclass
class _Check:
    """A check of a source: its kind, and its findings. hash_N: of the training images."""

    options: DataOptions
    findings: list[Finding] = field(default_factory=list)
    kind: str = ""
    unit: str = "image"
    done: str = "decoded"
    num_images: int = 0
    num_classes: int = 0
    num_decoded: int = 0
    hash_N: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def run(self) -> None:
        """Detects the kind of source and checks it. Raises CannotCheck for an unknown kind."""
        source, options = self.options.source, self.options
        is_several = is_pattern(source) or as_url(source) is not None
        if not is_several and not source.exists():
            raise CannotCheck(f"{source} not found; expected {_EXPECTED}")
        if source.suffix == ".bin":
            self.kind, bins = "pairs", [source]
        else:
            folder = source if source.is_dir() else source.parent if source.suffix == ".rec" else None
            bins = sorted(folder.glob("*.bin")) if folder and not is_several else []
            is_set = not source.is_dir() or (source / "train.rec").exists() or is_database(source)
            if is_set or class_folders(source) or (not bins and image_names(source)):
                self._check_sets(source)
            elif not bins:
                raise CannotCheck(f"{source} holds none of these: {_EXPECTED}")
        trained_hash = np.sort(self.hash_N)
        for path in bins:
            findings, num_decoded = check_pairs(path, options.num_workers, options.images, trained_hash, options.bar)
            self.findings += findings
            self.num_decoded += num_decoded

    def _check_sets(self, source: Path) -> None:
        """Checks the set at a path, or the sets of a pattern or .sets file together."""
        try:
            joined = open_sets([source], vectors=True, num_labels=self.options.labels)
            label_N = labels_of(joined)
            assert label_N is not None
        except (ValueError, OSError) as error:
            key = "label-range" if isinstance(error, LabelOutOfRange) else "set-unreadable"
            self.findings.append(Finding("error", key, str(error), file=str(source)))
            return
        self.findings += check_folders(joined, str(source))
        vectors = tables_of(joined)
        self.kind = "vectors" if vectors else _KINDS.get(type(joined), "set")
        if vectors:
            self.unit, self.done = "vector", "read"

        def read(i: int) -> bytes | NDArray[np.uint8]:
            try:
                return still(joined.read(i))
            except LabelOutOfRange as error:
                raise BadRecord(str(error)) from error

        def describe(i: int) -> Mapping[str, Any]:
            label = int(first(label_N)[i])
            return {"file": joined.where(i), **({} if label == UNREAD else {"class": label})}

        names = joined.class_names() or ()
        self._check_labels(source, label_N, joined.num_classes, describe, names)
        file, bar = str(source), source.name if self.options.bar else ""
        if not self.options.images:
            if not vectors:
                self.findings += unreadable(np.flatnonzero(first(label_N) == UNREAD), read, describe, file)
            return
        if vectors:
            found, are_embeddings = check_vectors(vectors, first(label_N), describe, file, bar)
            if are_embeddings:
                found += check_similar(vectors, first(label_N), describe, file, names, bar)
        else:
            height, width = (isinstance(joined, RecordSource) and joined.image_size) or (0, 0)
            scan = scan_images(read, len(label_N), self.options.num_workers, bar=bar)
            size = height if height == width > 0 else None
            found = check_images(scan, first(label_N), describe, file, size, embedding=True)
            self.hash_N = scan.hash_N
        self.findings += found
        self.num_decoded = len(label_N)

    def _check_labels(
        self, source: Path, label_N: NDArray[np.int64], num_classes: int, describe: Describe, names: Sequence[str]
    ) -> None:
        self.num_images, self.num_classes = len(label_N), self.options.num_classes or num_classes
        print(f"{source}: {self.kind}, {counted(self.num_images, self.unit)}, {counted(self.num_classes, 'class')}")
        if label_N.ndim > 1:
            count_N = (label_N != NONE).sum(axis=1)
            what = f"{count_N.min()} to {count_N.max()} labels each, {count_N.mean():.3g} on average"
            self.findings.append(Finding("info", "labels", what, int(count_N.sum()), file=str(source)))
        has_label = first(label_N) != UNREAD  # the others have their own finding
        labelled: NDArray[np.int64] | range = range(len(label_N)) if has_label.all() else np.flatnonzero(has_label)
        self.findings += check_labels(
            label_N if has_label.all() else label_N[has_label],
            self.num_classes,
            lambda i: describe(int(labelled[i])),
            str(source),
            names=names,
            embedding=True,
            unit=self.unit,
        )
