"""Image files in one folder per class, or named by a list."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.sample import BadRecord, Sample
from partial_fc.findings import counted

MAX_LABEL = 2**53  # labels are read as floats, exact up to here
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class ImageFolder:
    """Class i is the i-th sub-folder in sorted order; its images are in sorted order too.

    With a list file: one image a line, `path label` (the label last, so the path may hold blanks), or the .lst of
    im2rec, `index<TAB>label<TAB>path`. Paths are relative to `root`, which is the list's own folder if not given.

    left_out: how many files of the class folders end in something else than an image that can be read, by ending.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        list_file: str | os.PathLike[str] | None = None,
        num_classes: int | None = None,
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self.classes: list[str] = []
        if list_file is not None:
            self.root = Path(root) if root is not None else Path(list_file).parent
            self.names, self._labels = _read_list(Path(list_file))
        elif root is not None:
            self.root = Path(root)
            self.classes, self.names, self._labels, self.left_out = _scan(self.root)
        else:
            raise ValueError("neither a folder nor a list of images is given")
        self.num_classes = num_classes or len(self.classes) or int(self._labels.max()) + 1

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Sample:
        return Sample(self.read_file(index), int(self._labels[index]), index)

    def read_file(self, index: int) -> bytes:
        try:
            return (self.root / self.names[index]).read_bytes()
        except OSError as error:
            what = "not found" if isinstance(error, FileNotFoundError) else error.strerror
            raise BadRecord(f"{self.where(index)}: {what}") from None

    def where(self, index: int) -> str:
        return str(self.root / self.names[index])

    def key(self, index: int) -> str:
        """The image's path as the list has it, or below the folder."""
        return self.names[index]

    def will_need(self, indices: Sequence[int]) -> None:
        """Nothing: each file would have to be opened for the hint."""

    def labels(self) -> NDArray[np.int64]:
        return self._labels

    def class_names(self) -> list[str] | None:
        """The names of the folders; a list has none."""
        return self.classes or None

    def left_out_text(self) -> str:
        """`3 .heic, 1 .gif; only .jpg ... are read`."""
        counts = ", ".join(f"{number:,} {suffix}" for suffix, number in self.left_out.most_common())
        return f"{counts}; only {' '.join(_SUFFIXES)} are read"


def image_names(folder: Path) -> list[str]:
    """The image files of a folder, sorted."""
    return sorted(entry.name for entry in os.scandir(folder) if is_image_name(entry.name))


def is_image_name(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)


def _scan(root: Path) -> tuple[list[str], list[str], NDArray[np.int64], Counter[str]]:
    """(class names, file names, labels, files left out by their ending)."""
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected one with a sub-folder of images for each class")
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != ".")
    names, labels = [], []
    left_out: Counter[str] = Counter()
    for label, name in enumerate(classes):
        files = image_names(root / name)
        others = {entry.name for entry in os.scandir(root / name) if entry.is_file() and entry.name[0] != "."}
        left_out.update(Path(other).suffix.lower() or "without ending" for other in others.difference(files))
        names += [f"{name}/{file}" for file in files]
        labels += [label] * len(files)
    if not names:
        expected = f"expected ROOT/CLASS/IMAGE with {', '.join(_SUFFIXES)}"
        if flat := len(image_names(root)):
            raise ValueError(
                f"{root} itself holds the images, {flat} of them, not in a sub-folder for each class; {expected}. Move "
                "them, or name each with its label in a list (`path label` a line)"
            )
        raise ValueError(f"{root}: {counted(len(classes), 'sub-folder')}, no image in them; {expected}")
    return classes, names, np.array(labels, np.int64), left_out


def _read_list(path: Path) -> tuple[list[str], NDArray[np.int64]]:
    names, labels = [], []
    # A path is bytes to Linux: what is not UTF-8 comes back as it was.
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if path.suffix == ".lst":
                fields = line.rstrip("\n").split("\t")
                name, label = fields[-1], fields[1] if len(fields) >= 3 else ""
            else:
                name, _, label = line.strip().replace("\t", " ").rpartition(" ")
            try:
                value = float(label)
            except ValueError:
                value = -1.0
            if not (0 <= value <= MAX_LABEL and value.is_integer() and name.strip()) or "\0" in name:
                form = "index<TAB>label<TAB>path" if path.suffix == ".lst" else "path label"
                raise ValueError(
                    f"{path}, line {number}: expected `{form}`, label 0, 1, 2, ..., got {line.strip()[:200]!r}"
                )
            names.append(name.strip())
            labels.append(int(value))
    if not names:
        raise ValueError(f"{path} names no images")
    return names, np.array(labels, np.int64)
