"""`partial-fc doctor data`: checks a training or verification set before a run."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc import findings as report
from partial_fc import pictures
from partial_fc.data.check.contact_sheet import ContactSheet
from partial_fc.data.check.digits import check_digits
from partial_fc.data.check.images import check_images, check_vectors, scan_images, unreadable
from partial_fc.data.check.labels import UNREAD, check_folders, check_labels, labels_of
from partial_fc.data.check.pairs import check_pairs
from partial_fc.data.check.similar import check_similar
from partial_fc.data.idx import is_idx_folder
from partial_fc.data.image_folder import class_folders, image_names
from partial_fc.data.labels import NONE, first
from partial_fc.data.open import is_database
from partial_fc.data.recordio import RecordSource
from partial_fc.data.sample import BadRecord, LabelOutOfRange, still
from partial_fc.data.sets.joined import is_pattern, open_sets, tables_of
from partial_fc.data.sets.ranges import as_url
from partial_fc.findings import Describe, Finding, counted
from partial_fc.flags.facts import CLASSES, THREADS, In

_NOTHING_TO_CHECK = 2


class CannotCheck(ValueError):
    """Nothing of this set can be checked."""


@dataclass(frozen=True)
class DataOptions:
    """Checks index, headers, labels and every image of a set, and of the .bin files beside it. Exit status 0: no
    errors; 1: errors; 2: nothing to check."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A folder with train.rec, a .rec file, a folder with one sub-folder per class, a list, tar shards, a .parquet,
    vectors (.npz, .npy, .parquet), a pattern or .sets file of several, a folder with MNIST's idx files, or a .bin."""
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
    sheet: Path | None = None
    """A picture to write (.png): the first images of each finding, one finding a row, and a sample of the set."""
    bar: bool = True
    """Show a progress bar."""


_EXPECTED = (
    "a folder with train.rec, a .rec file, a folder of class folders, a list of images, a folder with MNIST's idx "
    "files, or a .bin"
)


def doctor_data(options: DataOptions) -> int:
    """Prints the findings and returns the exit status."""
    _check_options(options)
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
    if options.sheet:
        print(check.sheet.write(options.sheet))
    return int(num_errors > 0)


def _check_options(options: DataOptions) -> None:
    report.check_writable(options.report)
    if options.sheet and not options.images:
        raise ValueError(f"--sheet {options.sheet}: --no-images reads no images to draw")
    if options.sheet:
        pictures.check_name("--sheet", options.sheet)


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
    sheet: ContactSheet = field(default_factory=ContactSheet)

    def run(self) -> None:
        """Detects the kind of source and checks it. Raises CannotCheck for an unknown kind."""
        source, options = self.options.source, self.options
        is_set = source.suffix in (".sets", ".tar", ".parquet", ".npz", ".npy") or is_pattern(source) or as_url(source)
        if is_set or (options.labels > 1 and source.suffix != ".bin"):
            self._check_sets(source)
            return
        if not source.exists():
            raise CannotCheck(f"{source} not found; expected {_EXPECTED}")
        bins = sorted(source.glob("*.bin")) if source.is_dir() else []
        if source.suffix == ".bin":
            self.kind, bins = "pairs", [source]
        elif source.suffix == ".rec" or (source / "train.rec").exists():
            rec_path = source if source.is_file() else source / "train.rec"
            bins = sorted(rec_path.parent.glob("*.bin"))
            self._check_sets(rec_path, "RecordIO")
        elif is_idx_folder(source):
            self.kind, bins = "MNIST's idx files", []
            self.findings, self.num_decoded = check_digits(source, self.sheet)
            self.num_images, self.num_classes = self.num_decoded, 10
        elif is_database(source):
            self._check_sets(source, "image database")
        elif source.is_file():
            self._check_sets(source, "list")
        elif class_folders(source) or (not bins and image_names(source)):
            self._check_sets(source, "class folders")
        elif bins:
            self.kind = "pairs"
        else:
            raise CannotCheck(f"{source} holds none of these: {_EXPECTED}")
        trained_hash = np.sort(self.hash_N)
        for path in bins:
            findings, num_decoded = check_pairs(
                path, options.num_workers, options.images, trained_hash, options.bar, self.sheet
            )
            self.findings += findings
            self.num_decoded += num_decoded

    def _check_sets(self, source: Path, kind: str = "sets") -> None:
        """Checks a .rec, class folders, a list, tar shards, Parquet, vectors, or the sets of a pattern or .sets file,
        together."""
        self.kind = kind
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
        if vectors:
            self.kind, self.unit, self.done = "vectors", "vector", "read"

        def read(i: int) -> bytes | NDArray[np.uint8]:
            try:
                return still(joined.read(i))
            except LabelOutOfRange as error:
                raise BadRecord(str(error)) from error

        def describe(i: int) -> Mapping[str, Any]:
            label = int(first(label_N)[i])
            return {"file": joined.where(i), **({} if label == UNREAD else {"class": label})}

        names = joined.class_names() or ()
        if not vectors:
            height, width = (isinstance(joined, RecordSource) and joined.image_size) or (0, 0)
            size = height if height == width > 0 else None
            self._check_set(source, label_N, joined.num_classes, read, describe, size, names)
            return
        self._check_labels(source, label_N, joined.num_classes, describe, names)
        if self.options.images:
            bar = source.name if self.options.bar else ""
            found, are_embeddings = check_vectors(vectors, first(label_N), describe, str(source), bar)
            self.findings += found
            if are_embeddings:
                self.findings += check_similar(vectors, first(label_N), describe, str(source), names, bar)
            self.num_decoded = len(label_N)

    def _check_set(
        self,
        source: Path,
        label_N: NDArray[np.int64],
        num_classes: int,
        read: Callable[[int], bytes | NDArray[np.uint8]],
        describe: Describe,
        size: int | None,
        names: Sequence[str],
    ) -> None:
        """Checks labels and images. num_classes, size: as stated by the set. names: of its classes."""
        options = self.options
        self._check_labels(source, label_N, num_classes, describe, names)
        if not options.images:
            self.findings += unreadable(np.flatnonzero(first(label_N) == UNREAD), read, describe, str(source))
            return
        bar = source.name if options.bar else ""
        scan = scan_images(read, len(label_N), options.num_workers, bar=bar)
        findings = check_images(scan, first(label_N), describe, str(source), size, embedding=True)
        self.findings += findings
        self.sheet.add(findings, read, len(label_N), describe, source.name)
        self.hash_N, self.num_decoded = scan.hash_N, len(label_N)

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
