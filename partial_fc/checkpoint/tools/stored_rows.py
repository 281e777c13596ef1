"""Rows of all classes, wherever they come from: of a checkpoint, of another program's files, rearranged.

M classes asked for, D feature width. A class's rows are one entry of each column: "centres", the optimiser's state by
name, "touched".
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from partial_fc.checkpoint import rows as head_rows

_NAME = re.compile(r"head-(\d{5})-of-(\d{5})-classes-(\d{12})-(\d{12})\.safetensors")


class Column(NamedTuple):
    """What one class has of a tensor: (D,), (sub_centres, D) or (1,) numbers of a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Rows(Protocol):
    """Of classes 0 to num_classes - 1. A class that no step has touched may have none: it is not made."""

    num_classes: int

    @property
    def columns(self) -> dict[str, Column]: ...

    def made(self, start: int, stop: int) -> Tensor:
        """Which of the classes [start, stop) have rows: bool (stop - start,)."""
        ...

    def take(self, class_M: Tensor) -> dict[str, Tensor]:
        """The rows of classes that are made, in the order asked for: (M, ...) for each column."""
        ...


@dataclass(frozen=True)
class PartFile:
    """A file with the rows of classes [start, stop). Nothing is read before it is asked for, and then no more than
    that."""

    path: Path
    rank: int
    start: int
    stop: int

    @classmethod
    def of(cls, path: Path) -> "PartFile | None":
        """What the name says; None: it is another kind of file."""
        matched = _NAME.fullmatch(path.name)
        return cls(path, int(matched[1]), int(matched[3]), int(matched[4])) if matched else None

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Mapped from the file. Raises ValueError where it is damaged."""
        try:
            with safe_open(self.path, framework="pt") as file:
                found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path} is no safetensors file, or cut short: {error}") from error
        if "centres" not in found:
            raise ValueError(f"{self.path} holds {sorted(found)}; expected the centres, and their state by name")
        return found

    @cached_property
    def class_N(self) -> Tensor | None:
        """The numbers of the classes that are there, ascending; None: all of the range are."""
        return self.tensors.get("class")

    @cached_property
    def columns(self) -> dict[str, Column]:
        return {
            name: Column(tuple(t.shape[1:]), t.dtype) for name, t in sorted(self.tensors.items()) if name != "class"
        }

    @property
    def num_rows(self) -> int:
        return len(self.tensors["centres"])

    def made(self, start: int, stop: int) -> Tensor:
        """For a range inside this file's."""
        if self.class_N is None:
            return torch.ones(stop - start, dtype=torch.bool)
        low, high = torch.searchsorted(self.class_N, torch.tensor((start, stop))).tolist()
        made_L = torch.zeros(stop - start, dtype=torch.bool)
        made_L[self.class_N[low:high] - start] = True
        return made_L

    def places(self, class_M: Tensor) -> Tensor:
        """Where in the tensors the rows of these classes lie."""
        return class_M - self.start if self.class_N is None else torch.searchsorted(self.class_N, class_M)

    def problem(self) -> str | None:
        """What is wrong with shapes and class numbers, if anything is."""
        expected = self.stop - self.start
        if self.class_N is not None:
            class_N = self.class_N
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


class StoredRows:
    """Those of a checkpoint: the files of its head, of which only what is asked for is read."""

    def __init__(self, files: Iterable[PartFile], num_classes: int, where: str):
        """where: what messages call the checkpoint. Raises ValueError where the files' ranges leave a class out or
        hold one twice, or where the files do not fit together."""
        self.num_classes = num_classes
        self.files = sorted((file for file in files if file.stop > file.start), key=lambda file: file.start)
        problems = list(gaps(self.files, num_classes))
        if problems:
            raise ValueError(f"{where}: {problems[0]}")
        self._start_F = torch.tensor([file.start for file in self.files])
        for file in self.files:
            problem = file.problem() or mismatch(self.files[0], file)
            if problem:
                raise ValueError(f"{file.path}: {problem}")

    @property
    def columns(self) -> dict[str, Column]:
        return self.files[0].columns

    def made(self, start: int, stop: int) -> Tensor:
        parts = [
            file.made(max(start, file.start), min(stop, file.stop))
            for file in self.files
            if file.start < stop and start < file.stop
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)

    def take(self, class_M: Tensor, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """names: the columns to read; None: all."""
        file_M = torch.searchsorted(self._start_F, class_M, right=True) - 1
        wanted = {name: self.columns[name] for name in names or self.columns}
        taken = {name: torch.empty(len(class_M), *c.shape, dtype=c.dtype) for name, c in wanted.items()}
        for number in file_M.unique().tolist():
            file = self.files[number]
            at_K = (file_M == number).nonzero().squeeze(1)
            at, place = _range(at_K), _range(file.places(class_M[at_K]))
            for name, rows in taken.items():
                rows[at] = file.tensors[name][place]
        return taken


def _range(index_K: Tensor) -> Tensor | slice:
    """The same numbers as a slice, where they are consecutive: what is taken by a slice is not copied on the way."""
    first, count = int(index_K[0]), len(index_K)
    consecutive = int(index_K[-1]) - first == count - 1 and bool((index_K[1:] > index_K[:-1]).all())
    return slice(first, first + count) if consecutive else index_K


def gaps(files: list[PartFile], num_classes: int) -> Iterator[str]:
    """What is wrong with the class ranges of files in ascending order."""
    reached = 0
    for file in files:
        if file.start > reached:
            yield (
                f"no file holds classes {reached} to {file.start - 1}. Where each host has a folder of its own, "
                "give the folders of all of them"
            )
        elif file.start < reached:
            yield f"{file.path.name} holds classes from {file.start}, which another file holds, too"
        reached = max(reached, file.stop)
    if reached < num_classes:
        yield (
            f"no file holds classes {reached} to {num_classes - 1}. Where each host has a folder of its own, give the "
            "folders of all of them"
        )
    if reached > num_classes:
        yield f"{files[-1].path.name} holds classes up to {reached - 1}; there are {num_classes}"


def mismatch(first: PartFile, other: PartFile) -> str | None:
    """Where the columns of two files of one head differ."""
    for name in sorted(first.columns.keys() | other.columns.keys()):
        one, two = first.columns.get(name), other.columns.get(name)
        if one != two:
            return f"{name} is {_shown(two)}; it is {_shown(one)} in {first.path.name}"
    return None


def _shown(column: Column | None) -> str:
    return f"{column.dtype} {column.shape} a class" if column else "not there"


def class_bytes(rows: Rows) -> int:
    return sum(column.num_bytes for column in rows.columns.values())


def parts(rows: Rows, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
    """The classes [start, stop) in consecutive ranges for a file each: (first class, stop, those that are made)."""
    if start == stop:
        return
    at_M = rows.made(start, stop).nonzero().squeeze(1) + start
    most = max(1, head_rows.PART_BYTES // max(1, class_bytes(rows)))
    # A range goes on to the next made class that has no place in it.
    begins = [start, *at_M[most::most].tolist()]
    for number, (begin, end) in enumerate(zip(begins, [*begins[1:], stop], strict=True)):
        yield begin, end, at_M[number * most : (number + 1) * most]
