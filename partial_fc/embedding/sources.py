"""Sources of images, or vectors, to embed: image files, or what can be trained on. Unlike for training, no classes are
needed."""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partial_fc.data import ImageFolder, Sample, Source
from partial_fc.data.image_folder import class_folders, image_names, is_image_name
from partial_fc.data.open import NO_LISTS
from partial_fc.data.sets.joined import is_pattern, open_sets
from partial_fc.data.sets.ranges import as_url
from partial_fc.data.vectors import SUFFIXES, Vectors, has_labels, holds_vectors
from partial_fc.file_kind import kind_of_file
from partial_fc.files import regular
from partial_fc.findings import counted

NO_CLASS = -1


class ImageFiles(ImageFolder):
    """Image files without classes: all samples have the label NO_CLASS."""

    def __init__(self, root: Path, names: Sequence[str], left_out: dict[str, list[str]] | None = None):
        self.root, self.names, self.classes, self.left_out = root, list(names), [], left_out or {}
        self.num_classes = 0

    def read(self, index: int) -> Sample:
        return Sample(self.read_file(index), NO_CLASS, index)

    def labels(self) -> NDArray[np.int64]:
        return np.full(len(self.names), NO_CLASS, np.int64)


def open_images(paths: Sequence[Path], shared_classes: bool = False) -> Source:
    """Opens image files, or one set or several (`open_sets`). Raises ValueError if there are none, or the kind is
    ambiguous."""
    missing = [path for path in paths if not (path.exists() or as_url(path) or is_pattern(path))]
    if missing:
        raise ValueError(
            f"{missing[0]} not found; expected a folder of images or of class folders, a .rec, a list, or image files"
        )
    if all(_is_image(path) for path in paths):
        return ImageFiles(Path(), [str(path) for path in paths])
    if image := next(filter(_is_image, paths), None):
        raise ValueError(f"{image} among {counted(len(paths), 'path')}: give image files, or sets of images")
    if len(paths) == 1 and (files := _without_classes(paths[0])):
        return files
    return open_sets(paths, shared_classes=shared_classes, vectors=True)


def has_classes(source: Source) -> bool:
    """Tells whether a source of `open_images` has classes."""
    return not isinstance(source, ImageFiles) and (not isinstance(source, Vectors) or source.labelled)


def _without_classes(path: Path) -> ImageFiles | Vectors | None:
    """Opens a folder of image files, a list without labels or a table without them; None: something else."""
    if path.is_dir() and not (path / "train.rec").exists():
        flat = image_names(path)
        folders = class_folders(path)
        if flat and not any(image_names(path / folder) for folder in folders):
            left_out = defaultdict(list)
            for name in sorted({*os.listdir(path)} - {*flat, *folders}):
                left_out[Path(name).suffix.lower() or "without ending"].append(name)
            return ImageFiles(path, flat, left_out)
    if path.is_file() and holds_vectors(path) and not has_labels(path):
        return Vectors(path, labelled=False)
    if path.is_file() and path.suffix not in (*NO_LISTS, *SUFFIXES, ".lst", ".sets"):
        return ImageFiles(path.parent, names) if (names := _without_labels(path)) else None
    return None


def _is_image(path: Path) -> bool:
    return path.is_file() and (is_image_name(path.name) or kind_of_file(path).endswith("picture"))


def _without_labels(path: Path) -> list[str]:
    """Returns the paths in a list without labels, whose first line is a file's path; empty for other lists."""
    with open(path, encoding="utf-8", errors="surrogateescape", opener=regular) as file:
        lines = filter(None, (line.rstrip("\r\n") for line in file))
        first = next(lines, "")
        if not os.path.isfile(path.parent / first):  # Path.is_file raises for a name that is too long
            return []
        names = [first, *lines]
    for number, name in enumerate(names, start=1):
        if "\0" in name:
            raise ValueError(f"{path}, image {number}: expected a path, got {name[:80]!r}")
    return names
