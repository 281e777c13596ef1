"""Rows of classes (in a head, in files), the parts in which they are stored, and the reader of those.

A file holds the created classes of a class range [start, stop), which is in its name, and at most PART_BYTES of them:
one tensor for each column (`Rows.columns`), as stored, and, if some classes of the range were never created, their
numbers as "class". So a shard larger than memory is saved and loaded one file at a time, and rows never created take no
space. A reader takes the files that overlap its own range, whichever ranks wrote them.

M: classes asked for; N: classes of a part that are created.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from partial_fc.checkpoint.files import load_tensors
from partial_fc.head.protocol import scope
from partial_fc.head.rows.class_rows import Column

PART_BYTES = 256 << 20
_BLOCK = 1 << 16  # classes that are checked together
_CLASS = "class"
_NAME = re.compile(r"head-(?:([A-Za-z]\w*)-)?(\d{5})-of-(\d{5})-classes-(\d{12})-(\d{12})\.safetensors")


class Rows(Protocol):
    """The rows of classes [start, stop); a class that no step has touched need not be created."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def columns(self) -> dict[str, Column]: ...

    def created(self, start: int, stop: int) -> Tensor:
        """Returns which of the classes [start, stop) have rows: bool (stop - start,)."""
        ...

    def read(self, classes: Tensor | range) -> dict[str, Tensor]:
        """Returns rows of created classes, in the given order: (M, ...) for each column, maybe views of live rows."""
        ...


@dataclass
class Part:
    """The rows of classes [start, stop) as a file holds them. tensors: the columns, and "class", the ascending numbers
    of the created classes, if not all are."""

    start: int
    stop: int
    tensors: dict[str, Tensor]

    @property
    def rows(self) -> dict[str, Tensor]:
        """The columns, (N, ...) each."""
        return {name: t for name, t in self.tensors.items() if name != _CLASS}

    @property
    def class_N(self) -> Tensor:
        """Returns the numbers of the created classes."""
        return self.tensors[_CLASS] if _CLASS in self.tensors else torch.arange(self.start, self.stop)

    @property
    def columns(self) -> dict[str, Column]:
        return {name: Column(tuple(t.shape[1:]), t.dtype) for name, t in sorted(self.rows.items())}

    @property
    def num_rows(self) -> int:
        return len(self.tensors["centres"])

    def created(self, start: int, stop: int) -> Tensor:
        if _CLASS not in self.tensors:
            return torch.ones(stop - start, dtype=torch.bool)
        class_N = self.tensors[_CLASS]
        low, high = torch.searchsorted(class_N, torch.tensor((start, stop))).tolist()
        created_L = torch.zeros(stop - start, dtype=torch.bool)
        created_L[class_N[low:high] - start] = True
        return created_L

    def read(self, classes: Tensor | range, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Returns the rows of these classes. names: the columns to read; None: all."""
        class_M = class_numbers(classes)
        row_M = torch.searchsorted(self.tensors[_CLASS], class_M) if _CLASS in self.tensors else class_M - self.start
        index: Tensor | slice = row_M
        if len(row_M) and bool((row_M[1:] == row_M[:-1] + 1).all()):  # consecutive ones need no copy
            index = slice(int(row_M[0]), int(row_M[-1]) + 1)
        return {name: t[index] for name, t in self.rows.items() if names is None or name in names}

    def problem(self) -> str | None:
        """Returns what is wrong with shapes and class numbers, if anything."""
        expected = self.stop - self.start
        if _CLASS in self.tensors:
            class_N = self.tensors[_CLASS]
            if class_N.dtype != torch.int64 or class_N.dim() != 1:
                return f"class numbers are {class_N.dtype} of shape {tuple(class_N.shape)}; expected int64 (rows,)"
            expected = len(class_N)
            inside = expected == 0 or (int(class_N[0]) >= self.start and int(class_N[-1]) < self.stop)
            if not inside or bool((class_N[1:] <= class_N[:-1]).any()):
                return f"class numbers do not ascend within [{self.start}, {self.stop})"
        for name, t in self.tensors.items():
            if t.dim() < 1 or len(t) != expected:
                return f"{name} has shape {tuple(t.shape)}; expected {expected} rows"
        return None


def class_numbers(classes: Tensor | range) -> Tensor:
    return torch.arange(classes.start, classes.stop) if isinstance(classes, range) else classes


def class_bytes(rows: Rows) -> int:
    """Returns the bytes of one class's rows."""
    return sum(column.num_bytes for column in rows.columns.values())


def cut(rows: Rows, start: int, stop: int, most_bytes: int | None = None, copy: bool = False) -> Iterator[Part]:
    """Yields the created classes of [start, stop) in consecutive parts of at most most_bytes (None: PART_BYTES), on the
    CPU. copy: in memory of their own; else a part may be a view, valid until the rows change."""
    if start == stop:
        return
    most = max(1, (most_bytes or PART_BYTES) // max(1, class_bytes(rows)))
    begin, num_held = start, 0
    held: list[Tensor] = []
    for low in range(start, stop, _BLOCK):
        block_M = rows.created(low, min(low + _BLOCK, stop)).nonzero().squeeze(1) + low
        held, num_held = [*held, block_M], num_held + len(block_M)
        while num_held > most:
            class_M = torch.cat(held)
            # A range extends to the next created class that does not fit.
            end = int(class_M[most])
            yield _part(rows, begin, end, class_M[:most], copy)
            begin, held, num_held = end, [class_M[most:]], num_held - most
    yield _part(rows, begin, stop, torch.cat(held), copy)


def _part(rows: Rows, start: int, stop: int, class_M: Tensor, copy: bool) -> Part:
    if len(class_M) < stop - start:
        tensors = {name: t.cpu() for name, t in rows.read(class_M).items()} | {_CLASS: class_M}
        return Part(start, stop, tensors)
    views = rows.read(range(start, stop))
    return Part(start, stop, {name: copied(t) if copy else t.cpu() for name, t in views.items()})


def copied(t: Tensor) -> Tensor:
    """Returns a tensor in memory of its own, on the CPU; copied once, as training waits for it."""
    return t.clone() if t.device.type == "cpu" else t.cpu()


# ---- files


def file_name(table: str, rank: int, world_size: int, start: int, stop: int) -> str:
    return f"{scope(table)}-{rank:05d}-of-{world_size:05d}-classes-{start:012d}-{stop:012d}.safetensors"


@dataclass(frozen=True)
class PartFile:
    """A file with a part."""

    path: Path
    rank: int
    start: int
    stop: int

    def open(self) -> Part:
        """Opens the part, memory-mapped: data is read when it is used. Raises ValueError if the file is damaged, or its
        shapes and class numbers do not match."""
        tensors = load_tensors(self.path)
        if "centres" not in tensors:
            raise ValueError(f"{self.path} holds {sorted(tensors)}; expected the centres, and their state by name")
        part = Part(self.start, self.stop, tensors)
        problem = part.problem()
        if problem:
            raise ValueError(f"{self.path}: {problem}")
        return part


def part_files(folders: Iterable[Path], world_size: int, table: str = "") -> list[PartFile]:
    """Returns the files of this table's rows that so many ranks have written into these folders, by rising class; of
    equal names, that of the first folder."""
    by_name: dict[str, PartFile] = {}
    for path in (path for folder in folders for path in folder.glob(f"head-*-of-{world_size:05d}-classes-*")):
        m = _NAME.fullmatch(path.name)
        if m and (m[1] or "") == table and int(m[4]) < int(m[5]):
            by_name.setdefault(path.name, PartFile(path, int(m[2]), int(m[4]), int(m[5])))
    return sorted(by_name.values(), key=lambda file: (file.start, file.path.name))


class StoredRows:
    """The rows of classes [start, stop) from files, read on demand."""

    def __init__(
        self, files: Iterable[PartFile], start: int, stop: int, end: int, where: str, check: Callable[[Path], object]
    ):
        """files: by rising class, possibly also of other ranges. end: the number of all classes. where: the
        checkpoint's name in messages. check: called with a file's path before it is used. Raises ValueError if a class
        is in no file or in two; reading raises it if a file does not match the others, and what `check` raises."""
        self.start, self.stop = start, stop
        self.files = [file for file in files if file.start < stop and start < file.stop]
        first = min([start, *(file.start for file in self.files)])
        problem = next(gaps(self.files, first, stop, end), None)
        if problem:
            raise ValueError(f"{where}: {problem}")
        self._check = check
        self._start_F = torch.tensor([file.start for file in self.files])
        self._open: dict[PartFile, Part] = {}

    @cached_property
    def columns(self) -> dict[str, Column]:
        return self._read(self.files[0]).columns if self.files else {}

    def parts(self, files: Iterable[PartFile] | None = None) -> Iterator[Part]:
        """Yields the contents of these files (None: all), one after the other. The last call's files stay open."""
        before, self._open = self._open, {}
        for file in self.files if files is None else files:
            part = before.pop(file, None)
            if part is None:
                part = self._read(file)
                problem = mismatch(self.columns, part.columns, self.files[0].path.name)
                if problem:
                    raise ValueError(f"{file.path}: {problem}")
            if files is not None:
                self._open[file] = part
            yield part

    def _read(self, file: PartFile) -> Part:
        self._check(file.path)
        return file.open()

    def created(self, start: int, stop: int) -> Tensor:
        files = [file for file in self.files if file.start < stop and start < file.stop]
        parts = [part.created(max(start, part.start), min(stop, part.stop)) for part in self.parts(files)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)

    def read(self, classes: Tensor | range, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Returns the rows of these classes. names: the columns to read; None: all."""
        class_M = class_numbers(classes)
        file_M = torch.searchsorted(self._start_F, class_M, right=True) - 1
        numbers = file_M.unique().tolist()
        parts = self.parts([self.files[number] for number in numbers])
        if len(numbers) == 1:
            return next(parts).read(classes, names)
        columns = {name: column for name, column in self.columns.items() if names is None or name in names}
        rows = {name: torch.empty(len(class_M), *c.shape, dtype=c.dtype) for name, c in columns.items()}
        for number, part in zip(numbers, parts, strict=True):
            at_K = (file_M == number).nonzero().squeeze(1)
            for name, t in part.read(class_M[at_K], columns).items():
                rows[name].index_copy_(0, at_K, t)
        return rows


def gaps(files: list[PartFile], start: int, stop: int, end: int) -> Iterator[str]:
    """Yields what is wrong with the class ranges of files, by rising class, for [start, stop) of `end` classes."""
    elsewhere = "Where each host has a folder of its own, give the folders of all of them, or copy their files into one"
    reached = start
    for file in files:
        if file.start > reached:
            yield f"no file holds classes {reached} to {file.start - 1}. {elsewhere}"
        elif file.start < reached:
            yield f"{file.path.name} holds classes from {file.start}; another one holds those before {reached}"
        reached = max(reached, file.stop)
    if reached < stop:
        yield f"no file holds classes {reached} to {stop - 1}. {elsewhere}"
    if reached > end:
        yield f"{files[-1].path.name} holds classes up to {reached - 1}; expected none from {end} on"


def mismatch(expected: dict[str, Column], actual: dict[str, Column], where: str, dtypes: bool = True) -> str | None:
    """Returns how columns differ from those expected, which are of `where`. dtypes: compares those, too."""
    for name in sorted(expected.keys() | actual.keys()):
        one, two = expected.get(name), actual.get(name)
        if one != two and (dtypes or one is None or two is None or one.shape != two.shape):
            return f"{name} is {_shown(two)}; it is {_shown(one)} in {where}"
    return None


def _shown(column: Column | None) -> str:
    return f"{column.dtype} {column.shape} a class" if column else "not there"
