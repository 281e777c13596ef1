"""A source of image files, in one folder per class or named by a list."""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.labels import MAX_LABEL, in_rows, of_file, of_sample
from partial_fc.data.sample import MAX_FILE_BYTES, BadRecord, Sample, Source
from partial_fc.file_kind import TEXT, kind_of_file
from partial_fc.files import read_bytes, regular
from partial_fc.findings import counted

SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff")
_HEADER = re.compile(r"[A-Za-z_]+[ \t,]+[A-Za-z_]+")
_log = logging.getLogger(__name__)


class ImageFolder(Source):
    """Images whose class i is the i-th sub-folder in sorted order; images are sorted too.

    With a list file: one image a line, `path label` or `path,label` (the path may contain blanks), im2rec's .lst
    format, `index<TAB>label<TAB>path`, or face2rec2's, `aligned<TAB>path<TAB>label`; several labels are `path 3,5,8`
    and `index<TAB>3<TAB>5<TAB>8<TAB>path`. Paths are relative to `root`, by default the list's folder.

    left_out: reason -> paths of files that are not read: other endings (by ending), hidden images, folders within class
    folders, images beside the class folders.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        list_file: str | os.PathLike[str] | None = None,
        num_classes: int | None = None,
        num_labels: int = 1,
    ) -> None:
        self.num_labels = num_labels
        self.left_out: dict[str, list[str]] = {}
        self.classes: list[str] = []
        if list_file is not None:
            self.root = Path(root) if root is not None else Path(list_file).parent
            self.names, labels = _read_list(Path(list_file), num_labels > 1)
        else:
            assert root is not None
            self.root = Path(root)
            self.classes, self.names, labels, self.left_out = _scan(self.root)
        self._labels = of_file(labels, self)
        self.num_classes = num_classes or len(self.classes) or int(self._labels.max()) + 1

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Sample:
        label, more = of_sample(self._labels[index], self, index)
        return Sample(self.read_file(index), label, index, more)

    def read_file(self, index: int) -> bytes:
        try:
            return read_bytes(self.root / self.names[index], MAX_FILE_BYTES)
        except OSError as error:
            what = "not found" if isinstance(error, FileNotFoundError) else error.strerror
            raise BadRecord(f"{self.where(index)}: {what}") from None

    def where(self, index: int) -> str:
        return str(self.root / self.names[index])

    def key(self, index: int) -> str:
        """Returns the image's path as in the list, or relative to the folder."""
        return self.names[index]

    def labels(self) -> NDArray[np.int64]:
        return self._labels

    def layout(self) -> Iterator[NDArray[np.int64] | bytes]:
        yield self._labels
        yield from map(os.fsencode, self.names)

    def class_names(self) -> list[str] | None:
        """Returns the folder names; None for a list."""
        return self.classes or None

    def left_out_text(self) -> str:
        """Describes the ignored files: `3 .heic, 1 .mov; only .jpg ... are read`."""
        most_first = sorted(self.left_out.items(), key=lambda item: -len(item[1]))
        counts = ", ".join(f"{len(paths):,} {why}" for why, paths in most_first)
        return f"{counts}; only ROOT/CLASS/IMAGE with {' '.join(SUFFIXES)} are read"


def write_names(path: Path, names: Iterable[str]) -> None:
    """Writes names of classes, one a line, by label."""
    path.write_text("".join(f"{name}\n" for name in names), encoding="utf-8", errors="surrogateescape")


def image_names(folder: Path) -> list[str]:
    """Returns the names of a folder's image files, sorted."""
    return sorted(entry.name for entry in os.scandir(folder) if is_image_name(entry.name))


def is_image_name(name: str) -> bool:
    """Tells image files by their ending; not hidden ones: macOS puts `._1.jpg`, no image, beside 1.jpg."""
    return name.lower().endswith(SUFFIXES) and name[0] != "."


def class_folders(root: Path) -> list[str]:
    """Returns the names of the class folders, in order of class number."""
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != ".")


def _scan(root: Path) -> tuple[list[str], list[str], NDArray[np.int64], dict[str, list[str]]]:
    """Returns (class names, file names, labels, ignored files)."""
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected one with a sub-folder of images for each class")
    classes = class_folders(root)
    names, labels = [], []
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    for label, name in enumerate(classes):
        for entry in sorted(os.scandir(root / name), key=lambda entry: entry.name):
            if is_image_name(entry.name):
                names.append(f"{name}/{entry.name}")
                labels.append(label)
            elif why := _why_left_out(entry):
                left_out[why].append(f"{name}/{entry.name}")
    if flat := image_names(root):
        left_out["beside the class folders"] = flat
    if not names:
        expected = f"expected ROOT/CLASS/IMAGE with {', '.join(SUFFIXES)}"
        if flat:
            raise ValueError(
                f"{root} itself holds the images, {len(flat)} of them, not in a sub-folder for each class; {expected}. "
                "Move them, or name each with its label in a list (`path label` a line)"
            )
        if partial := sorted(entry.name for entry in os.scandir(root) if entry.name.endswith(".partial")):
            raise ValueError(f"{root} holds {' and '.join(partial)}: its writing was interrupted. Write it again")
        others = ", ".join(f"{len(paths):,} {why}" for why, paths in left_out.items())
        found = f"no image in them{f' ({others})' if others else ''}"
        inner = [name for name in classes if len(classes) == 1 or name.lower().startswith("train")]
        if inner and any(why.startswith("too deep") for why in left_out):
            expected = f"the path is one level too high: give {root / inner[0]}"
        raise ValueError(f"{root}: {counted(len(classes), 'sub-folder')}, {found}; {expected}")
    return classes, names, np.array(labels, np.int64), dict(left_out)


def _why_left_out(entry: os.DirEntry[str]) -> str:
    """Returns why an entry is ignored; "" for one that nobody takes for an image, such as .DS_Store."""
    name = entry.name
    if name[0] == ".":
        return "hidden" if name.lower().endswith(SUFFIXES) else ""
    if entry.is_dir():
        return "too deep (a folder within a class folder)"
    return Path(name).suffix.lower() or "without ending"


def _read_list(path: Path, several: bool) -> tuple[list[str], NDArray[np.int64]]:
    """Returns (paths, labels: the first of each, (N,), or all, (N, M))."""
    if (kind := kind_of_file(path)) not in (TEXT, ""):
        raise ValueError(f"{path} is {kind}; expected a list of images, `path label` a line")
    names: list[str] = []
    labels: list[int] = []
    counts: list[int] = []
    num_unaligned = 0
    # Linux paths are bytes: those that are not UTF-8 round-trip.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", opener=regular) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            fields = line.rstrip("\n").split("\t")
            if len(fields) > 2 and fields[0] in ("0", "1") and _number(fields[1]) < 0 <= _number(fields[2]):
                name, texts = fields[1], [fields[2]]  # face2rec2's; a box and points may follow
                num_unaligned += fields[0] == "0"
            elif path.suffix == ".lst":
                name, texts = fields[-1], fields[1:-1]
            else:
                name, _, text = line.strip().replace("\t", " ").rpartition(" ")
                if _number(text.split(",")[0]) < 0:
                    name, _, text = line.strip().rpartition(",")
                name, texts = name.rstrip().removesuffix(","), text.split(",")
                if number == 1 and _HEADER.fullmatch(line.strip()):
                    continue
            values = [_number(text) for text in (texts if several else texts[:1])]
            are_labels = bool(values) and all(0 <= value <= MAX_LABEL and value.is_integer() for value in values)
            if not (are_labels and name.strip()) or "\0" in name:
                form = "index<TAB>label<TAB>path" if path.suffix == ".lst" else "path label"
                raise ValueError(
                    f"{path}, line {number}: expected `{form}` (or `1<TAB>path<TAB>label`), label 0, 1, 2, ..., got "
                    f"{line.strip()[:200]!r}"
                )
            names.append(name.strip())
            labels += [int(value) for value in values]
            counts.append(len(values))
    if not names:
        raise ValueError(f"{path} names no images")
    if num_unaligned:
        _log.warning(
            "%s: %d of %d images are marked 0, not aligned; they are used as they are, whole: boxes and points of a "
            "list are not read. Align them first", path, num_unaligned, len(names),
        )  # fmt: skip
    return names, in_rows(np.array(labels, np.int64), np.array(counts))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
