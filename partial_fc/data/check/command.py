"""`partial-fc doctor data`: what is wrong with a training or verification set, before a run finds out."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import cv2
import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc import findings as report
from partial_fc.data.check.contact_sheet import Sheet
from partial_fc.data.check.digits import judge_digits
from partial_fc.data.check.identities import judge_identities, judge_layout
from partial_fc.data.check.image_findings import judge_images
from partial_fc.data.check.images import Looks, examine
from partial_fc.data.check.labels import judge_labels
from partial_fc.data.check.pairs import judge_pairs
from partial_fc.data.check.recordio import NO_LABEL, CannotCheck, Records
from partial_fc.data.image_folder import ImageFolder
from partial_fc.data.sample import Sample
from partial_fc.findings import Finding

_COULD_NOT_LOOK = 2


@dataclass(frozen=True)
class DataOptions:
    """Looks at index, headers, labels and every image of a set, and of the .bin files beside it. Exit status 0: nothing
    that would harm a training; 1: errors; 2: there is nothing to look at."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A folder with train.rec, a .rec file, a folder with one sub-folder per class, a list, a folder with MNIST's idx
    files, or a .bin."""
    num_classes: int | None = None
    """What the training will be told; what the set itself says if not given."""
    images: bool = True
    """Decode every image and look for equal files; without it only index, headers and labels are read."""
    num_workers: int = len(os.sched_getaffinity(0))
    """Threads that decode."""
    show: int = 10
    """Places of each finding that are printed."""
    report: Path | None = None
    """A JSON file to write: every finding with all its places."""
    sheet: Path | None = None
    """A picture to write (.png): the first images of each finding, one finding a row."""
    bar: bool = True
    """Show how far it is."""


@dataclass
class _Examination:
    options: DataOptions
    found: list[Finding] = field(default_factory=list)
    kind: str = ""
    num_images: int = 0
    num_classes: int = 0
    looked: int = 0
    hash_N: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    sheet: Sheet = field(default_factory=Sheet)


def doctor_data(options: DataOptions) -> int:
    """Prints the findings and returns the exit status."""
    _check(options)
    started = time.perf_counter()
    examination = _Examination(options)
    try:
        _examine(examination)
    except CannotCheck as error:
        print(f"partial-fc doctor data: {error}")
        return _COULD_NOT_LOOK
    seconds = time.perf_counter() - started
    if options.report:
        report.write_report(options.report, _summary(examination, seconds), examination.found)
    report.print_all(examination.found, options.show)
    errors, warnings = (report.count(examination.found, severity) for severity in ("error", "warning"))
    looked = examination.looked
    rate = f", {looked / seconds:,.0f} images/s" if looked else ""
    print(f"\n{errors} error(s), {warnings} warning(s); {looked:,} images decoded in {seconds:.1f} s{rate}")
    if options.report:
        print(f"all places: {options.report}")
    if options.sheet:
        print(examination.sheet.write(options.sheet, looked))
    return report.exit_status(examination.found)


def _check(options: DataOptions) -> None:
    if options.num_workers < 1 or options.show < 0:
        raise ValueError(f"--num-workers {options.num_workers}, --show {options.show}; expected at least 1 and 0")
    for path in (options.report, options.sheet):
        report.check_place(path)
    if options.sheet and not options.images:
        raise ValueError(f"--sheet {options.sheet}: nothing is to be seen with --no-images")
    if options.sheet and not cv2.haveImageWriter(str(options.sheet)):
        raise ValueError(f"--sheet {options.sheet}: expected the name of a picture, like sheet.png")


def _summary(examination: _Examination, seconds: float) -> dict[str, Any]:
    return {
        "source": str(examination.options.source),
        "kind": examination.kind,
        "images": examination.num_images,
        "classes": examination.num_classes,
        "images_decoded": examination.looked,
        "seconds": round(seconds, 2),
        "errors": report.count(examination.found, "error"),
        "warnings": report.count(examination.found, "warning"),
    }


def _examine(examination: _Examination) -> None:
    """By what the source is. Raises CannotCheck where it is nothing that is known."""
    source = examination.options.source
    if not source.exists():
        raise CannotCheck(f"{source} not found; expected {_EXPECTED}")
    bins: list[Path] = []
    if source.suffix == ".bin":
        examination.kind, bins = "pairs", [source]
    elif source.suffix == ".rec" or (source / "train.rec").exists():
        rec_path = source if source.is_file() else source / "train.rec"
        bins = sorted(rec_path.parent.glob("*.bin"))
        _of_records(examination, rec_path)
    elif source.is_dir() and _has_idx(source):
        examination.kind = "MNIST's idx files"
        examination.found, examination.looked = judge_digits(source, examination.sheet)
        examination.num_images, examination.num_classes = examination.looked, 10
    elif source.is_file() or any(entry.is_dir() for entry in os.scandir(source)):
        bins = sorted(source.glob("*.bin")) if source.is_dir() else []
        _of_files(examination, source)
    elif bins := sorted(source.glob("*.bin")):
        examination.kind = "pairs"
    else:
        raise CannotCheck(f"{source} holds none of these: {_EXPECTED}")
    known = np.sort(examination.hash_N)
    for path in bins:
        found, looked = judge_pairs(
            path,
            examination.options.num_workers,
            examination.options.images,
            known,
            examination.options.bar,
            examination.sheet,
        )
        examination.found += found
        examination.looked += looked


_EXPECTED = (
    "a folder with train.rec, a .rec file, a folder of class folders, a list of images, a folder with MNIST's idx "
    "files, or a .bin"
)


def _has_idx(folder: Path) -> bool:
    places = (folder, folder / "MNIST" / "raw")
    return any(any(place.glob(f"{split}-*-ubyte*")) for place in places for split in ("train", "t10k"))


def _of_records(examination: _Examination, rec_path: Path) -> None:
    options, file = examination.options, str(rec_path)
    examination.kind = "RecordIO"
    try:
        records = Records(rec_path)
    except CannotCheck as error:
        examination.found.append(Finding("error", "set-unreadable", str(error), file=file))
        return
    found, num_identities = judge_identities(records)
    said, size, about = _property(rec_path.with_name("property"), num_identities, len(records))
    label_N = records.label_N
    whole = label_N >= 0
    num_classes = options.num_classes or said or num_identities or (int(label_N[whole].max()) + 1 if whole.any() else 1)
    examination.num_images, examination.num_classes = len(records), num_classes
    print(f"{rec_path}: RecordIO, {len(records):,} images, {num_classes:,} classes")
    examination.found += [*records.findings, *about, *found, *judge_layout(records)]
    labelled = np.flatnonzero(label_N != NO_LABEL)  # the others have had their own finding
    examination.found += judge_labels(
        label_N[labelled], num_classes, lambda i: records.describe(int(labelled[i])), file
    )
    if options.images:
        # In the file's order, so that a disk reads it once from start to end.
        order = records.in_file_order()

        def read_in_order(place: int) -> bytes:
            return records.read(int(order[place]))

        looks = examine(
            read_in_order,
            len(records),
            options.num_workers,
            hear_decoder=True,
            bar=rec_path.name if options.bar else "",
        )

        def describe(place: int):
            return records.describe(int(order[place]))

        about_images = judge_images(looks, label_N[order], describe, file, size)
        examination.found += about_images
        examination.sheet.add(about_images, read_in_order)
        examination.hash_N, examination.looked = looks.hash_N, len(records)


def _of_files(examination: _Examination, source: Path) -> None:
    options = examination.options
    examination.kind = "class folders" if source.is_dir() else "list"
    try:
        files = ImageFolder(source) if source.is_dir() else ImageFolder(list_file=source)
    except (ValueError, OSError) as error:
        examination.found.append(Finding("error", "set-unreadable", str(error), file=str(source)))
        return
    label_N = files.labels()
    num_classes = options.num_classes or files.num_classes
    examination.num_images, examination.num_classes = len(files), num_classes
    print(f"{source}: {examination.kind}, {len(files):,} images, {num_classes:,} classes")

    def describe(i: int):
        return {"file": files.where(i), "class": int(label_N[i])}

    def read(i: int) -> bytes:
        sample: Sample = files.read(i)
        assert isinstance(sample.image, bytes), "files are encoded images"
        return sample.image

    examination.found += judge_labels(label_N, num_classes, describe, str(source))
    if options.images:
        looks: Looks = examine(
            read,
            len(files),
            options.num_workers,
            hear_decoder=True,
            bar=source.name if options.bar else "",
        )
        about_images = judge_images(looks, label_N, describe, str(source))
        examination.found += about_images
        examination.sheet.add(about_images, read)
        examination.hash_N, examination.looked = looks.hash_N, len(files)


def _property(path: Path, num_identities: int | None, num_images: int) -> tuple[int | None, int | None, list[Finding]]:
    """(classes, image size, findings) of the property file."""
    file = str(path)
    if not path.exists():
        what = "no `property` file (`num_classes,height,width`): the classes are counted instead"
        return None, None, [Finding("info", "property", what, file=file)]
    line = path.read_text(errors="replace").strip().partition("\n")[0]
    numbers = [int(text) if text.strip().isdecimal() else 0 for text in line.split(",")]
    said, height_width = numbers[0], numbers[1:3]
    if said < 1:
        what = f"expected `num_classes,height,width`, got {line[:80]!r}"
        return None, None, [Finding("error", "property", what, file=file)]
    found = []
    if num_identities and said != num_identities:
        what = f"it says {said} classes; the .rec has {num_identities} identity records"
        found.append(Finding("warning", "property-classes", what, file=file))
    if len(numbers) > 3 and numbers[3] and numbers[3] != num_images:
        what = f"it says {numbers[3]} images; the .rec has {num_images}"
        found.append(Finding("warning", "property-images", what, file=file))
    square = len(height_width) == 2 and height_width[0] == height_width[1] > 0
    return said, height_width[0] if square else None, found
