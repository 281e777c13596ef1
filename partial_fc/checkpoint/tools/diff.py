"""`partial-fc checkpoint diff`: in what two checkpoints differ, whatever numbers of ranks wrote them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from partial_fc.checkpoint.head_state import hard_negatives_name
from partial_fc.checkpoint.rows import Rows, class_bytes
from partial_fc.checkpoint.snapshot import local_name
from partial_fc.checkpoint.tools.checkpoint_on_disk import CheckpointOnDisk
from partial_fc.checkpoint.tools.reshard import local_tensors

_SHOWN = 10
_PIECE_BYTES = 32 << 20
# Facts on which the course of training depends. The others are shown, and do not count as a difference.
_STATE = (
    *("step", "position", "num_classes", "embedding_size", "sub_centres", "hard_negatives", "head"),
    *("loss_scaler", "left_out"),
)
_ASIDE = ("format", "world_size", "best", "score", "configuration", "versions")
_Table = dict[str, Tensor]


@dataclass(frozen=True)
class DiffOptions:
    """Shows in what two checkpoints differ. Exit status 0: training would go on alike from either; 1: it would not.
    Configuration, versions and scores are shown, and do not count."""

    first: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """A checkpoint, or a folder whose newest counts."""
    second: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """Another."""


def diff(options: DiffOptions) -> int:
    """Prints the differences; returns the exit status."""
    first, second = CheckpointOnDisk([options.first]), CheckpointOnDisk([options.second])
    different = False
    for counts, line in differences(first, second):
        different |= counts
        print(line)
    if not different:
        print(f"{first.folder} and {second.folder}: the same state")
    return int(different)


def differences(first: CheckpointOnDisk, second: CheckpointOnDisk) -> Iterator[tuple[bool, str]]:
    """Yields (whether it counts, a line)."""
    for key in _STATE:
        # What is empty, older checkpoints do not say at all.
        for line in _unlike(key, first.manifest.get(key) or None, second.manifest.get(key) or None):
            yield True, line
    for key in _ASIDE:
        for line in _unlike(key, first.manifest.get(key), second.manifest.get(key)):
            yield False, f"(aside) {line}"
    if first.names() != second.names():
        pairs = zip(first.names(), second.names(), strict=False)
        number = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
        yield (
            True,
            "class names: " + (f"first at class {number}" if number is not None else "different counts"),
        )
    for name, one, two in _tables(first, second):
        lines = list(_tensors(name, one, two))
        yield from ((True, line) for line in lines[:_SHOWN])
        if len(lines) > _SHOWN:
            yield True, f"{name}: ... and {len(lines) - _SHOWN} more"
    if first.world_size != second.world_size:
        yield False, "(aside) what each rank has for itself is not compared: other numbers of ranks"
    yield from ((True, line) for line in _rows(first, second))


def _tables(first: CheckpointOnDisk, second: CheckpointOnDisk) -> Iterator[tuple[str, _Table, _Table]]:
    """The tensors of each file but the head's rows."""
    names = ["backbone.safetensors", "optimizer.safetensors"]
    size = first.world_size
    ranks = range(size) if size == second.world_size else ()
    names += [hard_negatives_name(rank, size) for rank in ranks]
    for name in names:
        one, two = (stored.load(name) if stored.path(name) else {} for stored in (first, second))
        yield name, one, two
    for rank in ranks:
        yield local_name(rank, size), local_tensors(first, rank), local_tensors(second, rank)


def _unlike(key: str, one: Any, two: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(two, dict):
        for inner in sorted(one.keys() | two.keys()):
            yield from _unlike(f"{key}.{inner}", one.get(inner), two.get(inner))
    elif one != two:
        yield f"{key}: {_short(one)} | {_short(two)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tensors(name: str, one: _Table, two: _Table) -> Iterator[str]:
    """Lines for the tensors of a file that differ."""
    for key in sorted(one.keys() | two.keys()):
        if key not in one or key not in two:
            yield f"{name}: {key} is only in {'the first' if key in one else 'the second'}"
        elif one[key].shape != two[key].shape or one[key].dtype != two[key].dtype:
            yield f"{name}: {key} is {_kind(one[key])} | {_kind(two[key])}"
        else:
            unlike = ~_same(one[key], two[key])
            if bool(unlike.any()):
                yield (
                    f"{name}: {key} differs in {int(unlike.sum())} of {unlike.numel()} numbers, by at most "
                    f"{_largest(one[key], two[key]):.3g}"
                )


def _kind(t: Tensor) -> str:
    return f"{t.dtype} {tuple(t.shape)}"


def _same(one: Tensor, two: Tensor) -> Tensor:
    """Bit by bit would tell 0 from -0, which no step can; NaN is the same as NaN here."""
    equal = one == two
    return equal | (one.isnan() & two.isnan()) if one.is_floating_point() else equal


def _largest(one: Tensor, two: Tensor) -> float:
    gap = (one.double() - two.double()).abs()
    return gap[gap == gap].max().item() if bool((gap == gap).any()) else float("nan")


@dataclass
class _Column:
    """How one column differs, as far as it was compared."""

    num_classes: int = 0
    largest: float = 0.0
    first: tuple[int, ...] = ()

    def add(self, class_M: Tensor, one: Tensor, two: Tensor) -> None:
        unlike_M = (~_same(one, two)).flatten(1).any(dim=1)
        if bool(unlike_M.any()):
            self.num_classes += int(unlike_M.sum())
            self.largest = max(self.largest, _largest(one[unlike_M], two[unlike_M]))
            self.first = (*self.first, *class_M[unlike_M][:_SHOWN].tolist())[:_SHOWN]


def _rows(first: CheckpointOnDisk, second: CheckpointOnDisk) -> Iterator[str]:
    """The head's rows, piece by piece."""
    one, two = first.rows, second.rows
    if one.stop != two.stop:
        yield f"head: {one.stop} | {two.stop} classes, of which the common numbers are compared"
    for name in sorted(one.columns.keys() | two.columns.keys()):
        if one.columns.get(name) != two.columns.get(name):
            yield f"head: {name} is {one.columns.get(name)} | {two.columns.get(name)}"
    shared = sorted(name for name in one.columns if one.columns[name] == two.columns.get(name))
    columns = {name: _Column() for name in shared}
    only = [_Created("the first"), _Created("the second")]
    num_classes = min(one.stop, two.stop)
    step = max(1, _PIECE_BYTES // max(1, class_bytes(one)))
    for start in tqdm(range(0, num_classes, step), desc="head", leave=False, disable=None):
        _compare(one, two, start, min(start + step, num_classes), columns, only)
    for alone in only:
        if alone.num_classes:
            yield f"head: {alone.num_classes} classes have rows in {alone.where} only: {_listed(alone.first)}"
    for name, column in columns.items():
        if column.num_classes:
            yield (
                f"head: {name} differs in {column.num_classes} of {num_classes} classes, by at most "
                f"{column.largest:.3g}: {_listed(column.first)}"
            )


@dataclass
class _Created:
    """The classes that have rows in one checkpoint only."""

    where: str
    num_classes: int = 0
    first: tuple[int, ...] = ()


def _compare(one: Rows, two: Rows, start: int, stop: int, columns: dict[str, _Column], only: list[_Created]) -> None:
    created_2L = torch.stack((one.created(start, stop), two.created(start, stop)))
    for here_L, there_L, alone in zip(created_2L, created_2L.flip(0), only, strict=True):
        alone_M = (here_L & ~there_L).nonzero().squeeze(1) + start
        alone.num_classes += len(alone_M)
        alone.first = (*alone.first, *alone_M[:_SHOWN].tolist())[:_SHOWN]
    class_M = created_2L.all(dim=0).nonzero().squeeze(1) + start
    rows_one, rows_two = one.read(class_M), two.read(class_M)
    for name, column in columns.items():
        column.add(class_M, rows_one[name], rows_two[name])


def _listed(first: tuple[int, ...]) -> str:
    more = ", ..." if len(first) == _SHOWN else ""
    return f"class {', '.join(map(str, first))}{more}"
