"""Several sets as one source: `--rec A B 'shards/*.rec'`.

A pattern, `shards/*.rec` or `http://host/{000..031}.tar`, names the shards of one set, whose class numbers are common.
Each further path is a set of its own, whose class numbers begin behind those of the set before; --shared-classes makes
classes with the same name, of one set too, or without names with the same number, one class. A file NAME.sets has a set
on each line, `name path [weight]`, with paths relative to that file.
"""

import glob
import itertools
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.labels import NONE, check_inside
from partial_fc.data.open import open_source, stated
from partial_fc.data.recordio import RecordSource
from partial_fc.data.sample import BadRecord, LabelOutOfRange, Sample, Source
from partial_fc.data.sets.ranges import as_url
from partial_fc.data.vectors import Vectors
from partial_fc.files import named, read_text

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


Numbers = NDArray[np.int64] | range
Numbering = tuple[int, list[Numbers], list[str] | None]


class SetFiles(NamedTuple):
    """A set before it is opened: its shards, and how often it is drawn."""

    name: str
    paths: list[Path]
    weight: float = 1.0


class _Shard(NamedTuple):
    """A part of the whole. class_C: its class numbers -> those of the whole. prefix: of its keys."""

    name: str
    source: Source
    class_C: Numbers
    prefix: str


class Joined(Source):
    """Sets one after another. Samples are numbered from the first of the first set; that number is also their key.

    sets: (name, samples, weight) of each, for the order. num_labels: the most of any set; each is checked by its own.
    """

    def __init__(self, shards: Sequence[_Shard], sets: list[tuple[str, int, float]], num_classes: int,
                 names: list[str] | None) -> None:  # fmt: skip
        self.shards, self.sets, self.num_classes, self._names = shards, sets, num_classes, names
        self.remote = any(shard.source.remote for shard in shards)
        self.num_labels = max(shard.source.num_labels for shard in shards)
        self._stop_S = np.cumsum([count for _, count, _ in sets])
        self._starts = [0, *itertools.accumulate(len(shard.source) for shard in shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, index: int) -> Sample:
        shard, own = self._at(index)
        try:
            sample = shard.source.read(own)
        except BadRecord as error:
            raise BadRecord(f"{self._prefix(shard)}{error}") from None
        except LabelOutOfRange as error:
            message = f"{self._prefix(shard)}{error}"
            raise LabelOutOfRange(message, _outside(error.label, self.num_classes)) from None
        for label in (sample.label, *sample.more):
            if not 0 <= label < len(shard.class_C):
                expected = f"expected less than the {len(shard.class_C)} classes of the set"
                message = f"{self.where(index)}: label {label}; {expected}"
                raise LabelOutOfRange(message, _outside(label, self.num_classes))
        more = tuple(int(shard.class_C[label]) for label in sample.more)
        return Sample(sample.data, int(shard.class_C[sample.label]), index, more)

    def read_batch(self, index_B: NDArray[np.int64]) -> tuple[NDArray, NDArray[np.int64], NDArray[np.int64]] | None:
        shard_B = np.searchsorted(self._starts, index_B, side="right") - 1
        parts = []
        for number in np.unique(shard_B).tolist():
            (at_N,), shard = np.nonzero(shard_B == number), self.shards[number]
            part = shard.source.read_batch(index_B[at_N] - self._starts[number])
            if part is None:
                return None
            parts.append((part[0], self._classes(shard, part[1]), at_N))
        rows, labels, at_B = (np.concatenate(column) for column in zip(*parts, strict=True))
        back_B = np.argsort(at_B)
        return rows[back_B], labels[back_B], index_B

    def where(self, index: int) -> str:
        shard, own = self._at(index)
        return f"{self._prefix(shard)}{shard.source.where(own)}"

    def key(self, index: int) -> str:
        shard, own = self._at(index)
        return f"{shard.prefix}/{shard.source.key(own)}"

    def will_need(self, indices: Sequence[int]) -> None:
        for shard, own in itertools.groupby(sorted(indices), lambda index: self._at(index)[0]):
            shard.source.will_need([self._at(index)[1] for index in own])

    def read_ahead(self, first: int, stop: int) -> None:
        """Reads samples first to stop - 1, of .rec files, into the page cache; blocks until done."""
        while first < stop:
            shard, own = self._at(first)
            end = min(len(shard.source), own + stop - first)
            assert isinstance(shard.source, RecordSource)
            shard.source.read_ahead(own, end)
            first += end - own

    def layout(self) -> Iterator[NDArray[Any] | bytes]:
        for shard in self.shards:
            yield from shard.source.layout()

    def labels(self) -> NDArray[np.int64]:
        return np.concatenate([self._mapped(shard) for shard in self.shards])

    def label_bytes(self) -> int:
        return sum(shard.source.label_bytes() for shard in self.shards)

    def class_names(self) -> list[str] | None:
        return self._names

    def set_of(self, index_N: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._stop_S, index_N, side="right")

    def close(self) -> None:
        for shard in self.shards:
            shard.source.close()

    def notes(self, shared_classes: bool) -> list[str]:
        """Returns a line for the log about each set."""
        notes = []
        for name, count, weight in self.sets:
            mine = [shard for shard in self.shards if shard.name == name]
            classes = mine[0].class_C
            unit = "vectors" if isinstance(mine[0].source, Vectors) else "images"
            line = f"set {name}: {count:,} {unit}" + (f" in {len(mine)} shards" if len(mine) > 1 else "")
            if len(self.sets) > 1 and not shared_classes:
                line += f", classes {classes[0]} to {classes[-1]}"
            elif shared_classes:
                line += f", {len(classes):,} classes of {len(np.unique(classes)):,} names"
            notes.append(line + (f", {drawn(count, weight):,} draws an epoch" if weight != 1 else ""))
        of_all = np.concatenate([next(s.class_C for s in self.shards if s.name == name) for name, *_ in self.sets])
        if shared_classes and len(np.unique(of_all)) == len(of_all):
            notes.append("--shared-classes: no two classes have one name")
        return notes

    def _at(self, index: int) -> tuple[_Shard, int]:
        shard = bisect_right(self._starts, index) - 1
        return self.shards[shard], index - self._starts[shard]

    def _classes(self, shard: _Shard, label_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the joined class numbers of a shard's labels; for a label of no class one that no class has."""
        known = (label_N >= 0) & (label_N < len(shard.class_C))
        class_N = np.asarray(shard.class_C)[np.where(known, label_N, 0)]
        class_N = np.where(known, class_N, _outside(label_N, self.num_classes))
        if self.num_labels == 1:
            return class_N
        class_NK = class_N.reshape(len(class_N), -1)
        return np.pad(class_NK, ((0, 0), (0, self.num_labels - class_NK.shape[1])), constant_values=NONE)

    def _mapped(self, shard: _Shard) -> NDArray[np.int64]:
        try:
            label_N = shard.source.labels()
            if label_N is None:
                raise ValueError(f"{shard.source.where(0)}: its labels are not known before it is read")
            if self.num_labels > shard.source.num_labels == 1:  # -1 is no filler
                check_inside(label_N, shard.source)
        except LabelOutOfRange as error:
            raise LabelOutOfRange(f"{self._prefix(shard)}{error}", error.label) from None
        return self._classes(shard, label_N)

    def _prefix(self, shard: _Shard) -> str:
        return f"set {shard.name}: " if len(self.sets) > 1 else ""


def open_sets(
    paths: Sequence[Path],
    num_classes: int | None = None,
    shared_classes: bool = False,
    *,
    vectors: bool = False,
    num_labels: int | Mapping[str, int] = 1,
) -> Source | Joined:
    """Opens one set or several. vectors: files of vectors, too. num_labels: see `open_source`; of all sets, or of each
    by its name. Raises ValueError if a pattern has no file, a file is named twice, images and vectors are mixed, or the
    sets have more classes than num_classes."""
    sets = find_sets(paths)
    most = [num_labels if isinstance(num_labels, int) else num_labels[one.name] for one in sets]
    if len(sets) == 1 and len(sets[0].paths) == 1 and not shared_classes:
        return open_source(sets[0].paths[0], num_classes, vectors=vectors, num_labels=most[0])
    # The shards of one set need no number of their own.
    number = num_classes if len(sets) == 1 and not shared_classes else None
    opened = []
    for one, own in zip(sets, most, strict=True):
        try:
            opened.append([open_source(path, number, vectors=vectors, num_labels=own) for path in one.paths])
        except LabelOutOfRange as error:
            where = f"set {one.name}: " if len(sets) > 1 else ""
            raise LabelOutOfRange(f"{where}{error}", error.label) from None
    kinds = {f"{one.name} has {_kind(source)}" for one, sources in zip(sets, opened, strict=True) for source in sources}
    if len({kind.partition(" has ")[2] for kind in kinds}) > 1:
        raise ValueError(f"the sets differ: {', '.join(sorted(kinds))}; expected images, or vectors of one length")
    numbers = [max(source.num_classes for source in sources) for sources in opened]
    # Shards of one set have one list of names, beside the first.
    names = [sources[0].class_names() for sources in opened]
    common: list[Numbers] = [range(number) for number in numbers]
    total, class_numbers, all_names = max(numbers), common, names[0]
    if len(sets) > 1 and not shared_classes:
        total, class_numbers, all_names = _behind_each_other(sets, numbers, names)
    elif shared_classes and any(names):
        total, class_numbers, all_names = _by_name(sets, numbers, names)
    if num_classes is not None and total > num_classes:
        each = ", ".join(f"{one.name} {number:,}" for one, number in zip(sets, numbers, strict=True))
        raise ValueError(f"the sets have {total:,} classes together ({each}); --num-classes is {num_classes:,}")
    shards = [
        _Shard(one.name, source, classes, f"{one.name}/{path.name}" if len(sources) > 1 else one.name)
        for one, sources, classes in zip(sets, opened, class_numbers, strict=True)
        for source, path in zip(sources, one.paths, strict=True)
    ]
    counts = [(one.name, sum(map(len, sources)), one.weight) for one, sources in zip(sets, opened, strict=True)]
    return Joined(shards, counts, num_classes or total, all_names)


def as_joined(paths: Sequence[Path], source: Source) -> Joined:
    """Returns what `open_sets` has opened, as sets: one file is one of them."""
    if isinstance(source, Joined):
        return source
    name = find_sets(paths)[0].name
    shard = _Shard(name, source, range(source.num_classes), "")
    return Joined([shard], [(name, len(source), 1.0)], source.num_classes, source.class_names())


def parts_of(source: Source) -> list[Source]:
    """Returns the shards of several sets, or the one source."""
    return [shard.source for shard in source.shards] if isinstance(source, Joined) else [source]


def tables_of(source: Source) -> list[Vectors]:
    """Returns the files of a source of vectors; none if it has images."""
    return [part for part in parts_of(source) if isinstance(part, Vectors)]


def _kind(source: Source) -> str:
    return f"vectors of {source.width}" if isinstance(source, Vectors) else "images"


def _behind_each_other(sets: Sequence[SetFiles], numbers: list[int], names: list[list[str] | None]) -> Numbering:
    """Returns (classes together, the class numbers of each set, names with the set before them)."""
    starts = [0, *itertools.accumulate(numbers)]
    all_names = None
    if any(names):
        all_names = []
        for one, number, own in zip(sets, numbers, names, strict=True):
            own = own or []
            all_names += [f"{one.name}/{own[label] if label < len(own) else label}" for label in range(number)]
    return starts[-1], [range(first, stop) for first, stop in itertools.pairwise(starts)], all_names


def _by_name(sets: Sequence[SetFiles], numbers: list[int], names: list[list[str] | None]) -> Numbering:
    number_of: dict[str, int] = {}
    class_numbers: list[Numbers] = []
    for one, number, own in zip(sets, numbers, names, strict=True):
        if own is None or len(own) < number:
            raise ValueError(
                f"--shared-classes: set {one.name} has {number} classes and {len(own or [])} names; each class needs "
                "one, in class folders or classes.txt, if another has"
            )
        class_numbers.append(np.array([number_of.setdefault(name, len(number_of)) for name in own], np.int64))
    return len(number_of), class_numbers, list(number_of)


def _outside(label: Any, num_classes: int) -> Any:
    """Returns a number of no class for a label of no class, which may be another set's."""
    return label + num_classes * (label >= 0)


# ---- which files


def stated_together(paths: Sequence[Path], size_matters: bool) -> tuple[int | None, tuple[int, int] | None]:
    """Returns what the sets state, as `stated`: the classes of a single set, and the image size. Raises ValueError if
    size_matters and they state different sizes."""
    try:
        sets = find_sets(paths)
    except (ValueError, OSError):  # opening them reports it
        return None, None
    found = {f"{one.name} ({path})": stated(path) for one in sets for path in one.paths if not as_url(path)}
    sizes = {size: name for name, (_, size) in found.items() if size and min(size) > 0}
    if len(sizes) > 1 and size_matters:
        each = ", ".join(f"{name} {width} x {height}" for (height, width), name in sizes.items())
        raise ValueError(f"the sets state different image sizes: {each}; choose one with --image-size")
    classes = [number for number, _ in found.values() if number]
    return max(classes, default=None) if len(sets) == 1 else None, next(iter(sizes), None)


def find_sets(paths: Sequence[Path]) -> list[SetFiles]:
    """Returns the sets that paths, patterns and .sets files name. Raises ValueError if a pattern has no file, a line
    makes no sense, or a file is in two sets."""
    found: list[SetFiles] = []
    for path in paths:
        name, path = named(path)
        found += _read_sets(path) if path.suffix == ".sets" else [SetFiles(name or set_name(path), matching(path))]
    sets: dict[str, SetFiles] = {}
    for one in found:
        copies = (f"{one.name}-{number}" for number in itertools.count(2))
        name = one.name if one.name not in sets else next(name for name in copies if name not in sets)
        sets[name] = one._replace(name=name)
    if len(sets) > 1 or any(len(one.paths) > 1 for one in found):
        _check_different(list(sets.values()))
    return list(sets.values())


def matching(pattern: Path) -> list[Path]:
    """Returns the files of a pattern, sorted: with {000..031} and shell wildcards, but for labels beside vectors; of
    another path, itself."""
    text = str(pattern)
    if braces := _RANGE.search(text):
        first, last = braces.groups()
        numbers = range(int(first), int(last) + 1)
        each = [Path(f"{text[: braces.start()]}{n:0{len(first)}}{text[braces.end() :]}") for n in numbers]
        return [file for path in each for file in matching(path)]
    if as_url(pattern) or not glob.has_magic(text) or pattern.exists():
        return [pattern]
    found = sorted(Path(file) for file in glob.glob(text, recursive=True) if not file.endswith(".labels.npy"))
    if not found:
        raise ValueError(f"no file matches {text}; it is a pattern, which names the shards of one set")
    return found


def set_name(path: Path) -> str:
    """Returns the name of a set: of its file or folder, of a pattern's folder."""
    name = path.parent.name if path.name == "train.rec" or is_pattern(path) else path.stem or path.resolve().name
    return re.sub(r"[^\w.+-]+", "_", name) or "data"


def is_pattern(path: Path) -> bool:
    return bool(_RANGE.search(str(path))) or (glob.has_magic(str(path)) and not path.exists())


def _read_sets(path: Path) -> list[SetFiles]:
    sets = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        name, _, rest = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        first, _, last = rest.strip().rpartition(" ")
        try:
            where, weight = (first, float(last)) if first else (last, 1.0)
        except ValueError:
            where, weight = rest.strip(), 1.0  # a path with a blank
        if not where or not 0 < weight <= 1000:
            raise ValueError(f"{path}, line {number}: expected `name path [weight]`, 0 < weight <= 1000; got {line!r}")
        pattern = Path(where) if as_url(where) else path.parent / where
        sets.append(SetFiles(name, matching(pattern), weight))
    if not sets:
        raise ValueError(f"{path} names no set; expected `name path [weight]` a line")
    return sets


def _check_different(sets: Sequence[SetFiles]) -> None:
    seen: dict[object, str] = {}
    for one in sets:
        for path in one.paths:
            file: object = as_url(path)
            if file is None and path.exists():  # opening it reports the error
                rec = path / "train.rec"
                status = os.stat(rec if rec.exists() else path)
                file = status.st_dev, status.st_ino
            if file is not None and file in seen:
                raise ValueError(
                    f"{path} is in set {seen[file]} and again in set {one.name}: it would count twice. Name it "
                    "once; a weight in a .sets file draws a set more often"
                )
            seen[file] = one.name


def drawn(count: int, weight: float) -> int:
    """Returns how many samples of a set with `count` an epoch draws."""
    return max(1, math.floor(count * weight + 0.5))
