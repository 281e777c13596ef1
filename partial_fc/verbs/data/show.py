"""`partial-fc data show`: a picture of any set, a class a row. (A run draws what it sees itself: first_batch.png.)"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc import pictures
from partial_fc.data import Source
from partial_fc.data.decode import decode
from partial_fc.data.image_folder import class_folders
from partial_fc.data.open import open_any
from partial_fc.data.pairs import read_pairs
from partial_fc.data.sample import BadRecord, still
from partial_fc.findings import counted
from partial_fc.flags.facts import In, check_numbers
from partial_fc.pictures import Pixels, Row, Tile

_LOOKED_AT = 4096  # records, if their labels are inside them


@dataclass(frozen=True)
class ShowOptions:
    """Draws a picture of a set: some of its classes, one a row, some images of each, with names and numbers. Of pairs
    (.bin, also those beside a .rec): the first image above the second, one class, then two."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A folder with train.rec, a .rec, a folder of class folders, a list of images, a .bin, a database of images, or
    idx files."""
    out: Path
    """The picture to write, like sheet.png."""
    classes: Annotated[int, In(1)] = 10
    """Number of classes, chosen at random."""
    images: Annotated[int, In(1)] = 10
    """Images of each class, or pairs of each kind, chosen at random."""
    seed: int = 0
    """Seed of the choice."""

    def __post_init__(self) -> None:
        check_numbers(self)


def show(options: ShowOptions) -> None:
    """Writes options.out. Raises ValueError if there is nothing to show or the file cannot be written."""
    pictures.check_name("--out", options.out)
    path = options.source
    if not path.exists():
        raise ValueError(f"{path} not found; expected a folder, a list, a .rec, a .bin or a database of images")
    bins = [path] if path.suffix == ".bin" else sorted(path.glob("*.bin")) if path.is_dir() else []
    rows: list[Row] = []
    problems: list[str] = []
    if not bins or (path.is_dir() and ((path / "train.rec").exists() or class_folders(path))):
        rows += _class_rows(open_any(path, None, "train"), options, problems)
    rows += [row for each in bins for row in _pair_rows(each, options, problems)]
    if problems and all(tile.image is None for row in rows for tile in row.tiles):
        raise ValueError(f"not one of {counted(len(problems), 'sample')} can be used; the first: {problems[0]}")
    pictures.write(options.out, pictures.sheet(rows, max(pictures.A_ROW, options.images)))
    print(f"{options.out}: {counted(len(rows), 'row')}")
    if problems:
        print(f"{counted(len(problems), 'sample')} cannot be used, drawn as crosses; the first: {problems[0]}")


def _class_rows(source: Source, options: ShowOptions, problems: list[str]) -> Iterator[Row]:
    """Yields a row per class. problems: receives the errors of unusable samples."""
    rng = np.random.default_rng(options.seed)
    label_N, index_N = _labels(source, rng)
    names = source.class_names() or []
    whose = "" if len(index_N) == len(source) else f" among {len(index_N):,} of {len(source):,} records"
    values = np.unique(label_N)
    for label in sorted(rng.choice(values, min(options.classes, len(values)), replace=False).tolist()):
        of_class = index_N[label_N == label]
        chosen = sorted(rng.choice(of_class, min(options.images, len(of_class)), replace=False).tolist())
        name = f" ({names[label]})" if 0 <= label < len(names) else ""
        title = f"class {label}{name}: {counted(len(of_class), 'image')}{whose}"
        tiles = []
        for index in chosen:
            try:
                stored = still(source.read(index))
                image = decode(stored) if isinstance(stored, bytes) else stored
                size = f"{image.shape[1]} x {image.shape[0]}"
                tiles.append(Tile(pictures.fit(image), [_name(source, index), size]))
            except BadRecord as error:
                tiles.append(Tile(None, [_name(source, index)]))
                where, what = source.where(index), str(error)
                problems.append(what if what.startswith(where) else f"{where}: {what}")
        yield Row(title, tiles)


def _labels(source: Source, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns (labels, indices of samples that have them): of all, or of some if labels are inside the records."""
    label_N = source.labels()
    if label_N is not None:
        return label_N, np.arange(len(source))
    label_of = {}
    for index in sorted(rng.choice(len(source), min(_LOOKED_AT, len(source)), replace=False).tolist()):
        try:
            label_of[index] = source.read(index).label
        except BadRecord:
            continue  # left to doctor data
    if not label_of:
        raise ValueError(f"{source.where(0)} and others: not one record could be read")
    return np.array(list(label_of.values()), np.int64), np.array(list(label_of), np.int64)


def _name(source: Source, index: int) -> str:
    """Returns a sample's short name: of "photos/alice/1.jpg" the file, of "faces/train.rec, key 17" the key."""
    return source.where(index).rpartition("/")[2].rpartition(", ")[2]


def _pair_rows(path: Path, options: ShowOptions, problems: list[str]) -> Iterator[Row]:
    pairs, rng = read_pairs(path), np.random.default_rng(options.seed)

    def image(index: int) -> Pixels:
        return pictures.fit(decode(pairs.images[index]))

    for same, what in ((True, "one class"), (False, "two classes")):
        of_kind = np.flatnonzero(pairs.same == same)
        tiles = []
        for pair in sorted(rng.choice(of_kind, min(options.images, len(of_kind)), replace=False).tolist()):
            try:
                tiles.append(Tile(np.concatenate((image(2 * pair), image(2 * pair + 1))), [f"pair {pair}"]))
            except BadRecord as error:
                tiles.append(Tile(None, [f"pair {pair}"]))
                problems.append(f"{path}, pair {pair}: {error}")
        yield Row(f"{path.name}, {what}: {counted(len(of_kind), 'pair')}, the first image above the second", tiles)
