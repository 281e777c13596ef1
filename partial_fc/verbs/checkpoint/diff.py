"""`partial-fc checkpoint diff`: in what two checkpoints differ, whatever numbers of ranks wrote them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partial_fc import terminal
from partial_fc.checkpoint.head_state import hard_negatives_name, tables_in
from partial_fc.checkpoint.read import Checkpoint, open_with_centres
from partial_fc.checkpoint.rows import Rows, class_bytes
from partial_fc.checkpoint.snapshot import local_name
from partial_fc.head.protocol import scope
from partial_fc.verbs.checkpoint.options import DiffOptions

_SHOWN = 10
_PIECE_BYTES = 32 << 20
# Facts on which the course of training depends. The others are shown, and do not count as a difference.
_STATE = (
    *("step", "position", "num_classes", "embedding_size", "sub_centres", "hard_negatives", "head"),
    *("tables", "loss_scaler", "left_out"),
)
_ASIDE = ("format", "world_size", "best", "score", "configuration", "versions")
_Table = dict[str, Tensor]


def diff(options: DiffOptions) -> int:
    """Prints the differences; returns the exit status."""
    first, second = (open_with_centres(folder, named=True) for folder in (options.first, options.second))
    different = False
    for counts, line in differences(first, second):
        different |= counts
        print(line)
    if not different:
        print(f"{first.folder} and {second.folder}: the same state")
    return int(different)


def differences(first: Checkpoint, second: Checkpoint) -> Iterator[tuple[bool, str]]:
    """Yields (whether it counts, a line)."""
    for key in _STATE:
        # What is empty, older checkpoints do not say at all.
        for line in _unlike(key, first.manifest.get(key) or None, second.manifest.get(key) or None):
            yield True, line
    for key in _ASIDE:
        for line in _unlike(key, first.manifest.get(key), second.manifest.get(key)):
            yield False, f"(aside) {line}"
    tables, others = (tables_in(each.manifest, each.where) for each in (first, second))
    both = [name for name in tables if name in others]  # a table that one lacks is a difference of the manifests
    if "" in both and first.names() != second.names():
        pairs = zip(first.names(), second.names(), strict=False)
        number = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
        yield (True, "class names: " + (f"first at class {number}" if number is not None else "different counts"))
    for name, one, two in _tables(first, second, both):
        lines = list(_tensors(name, one, two))
        yield from ((True, line) for line in lines[:_SHOWN])
        if len(lines) > _SHOWN:
            yield True, f"{name}: ... and {len(lines) - _SHOWN} more"
    if first.world_size != second.world_size:
        yield False, "(aside) what each rank has for itself is not compared: other numbers of ranks"
    for name in both:
        rows = first.rows(table=name), second.rows(table=name)
        yield from ((True, line) for line in _rows(scope(name), *rows))


def _tables(first: Checkpoint, second: Checkpoint, both: Sequence[str]) -> Iterator[tuple[str, _Table, _Table]]:
    """The tensors of each file but the head's rows. both: the head's tables that both have."""
    size = first.world_size
    ranks = range(size) if size == second.world_size else ()
    lists = [hard_negatives_name(table, rank, size) for table in both for rank in ranks]
    for name in ("backbone.safetensors", "optimizer.safetensors", *lists):
        yield name, first.load(name, optional=True), second.load(name, optional=True)
    for rank in ranks:
        yield local_name(rank, size), first.local(rank), second.local(rank)


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
class _Classes:
    """Classes that differ in something: how many, the first of them, by how much at most."""

    count: int = 0
    first: tuple[int, ...] = ()
    largest: float = 0.0

    def add(self, class_M: Tensor, largest: float = 0.0) -> None:
        self.count += len(class_M)
        self.first = (*self.first, *class_M[:_SHOWN].tolist())[:_SHOWN]
        self.largest = max(self.largest, largest)

    def __str__(self) -> str:
        return f"class {', '.join(map(str, self.first))}{', ...' if len(self.first) == _SHOWN else ''}"


def _rows(table: str, first: Rows, second: Rows) -> Iterator[str]:
    """Compares the rows of a table, piece by piece."""
    one, two = first.columns, second.columns
    if first.stop != second.stop:
        yield f"{table}: {first.stop} | {second.stop} classes, of which the common numbers are compared"
    for name in sorted(one.keys() | two.keys()):
        if one.get(name) != two.get(name):
            yield f"{table}: {name} is {one.get(name)} | {two.get(name)}"
    columns = {name: _Classes() for name in sorted(one) if one[name] == two.get(name)}
    only = {"the first": _Classes(), "the second": _Classes()}
    num_classes = min(first.stop, second.stop)
    step = max(1, _PIECE_BYTES // max(1, class_bytes(first)))
    for start in terminal.bar(range(0, num_classes, step), desc=table, leave=False):
        stop = min(start + step, num_classes)
        created_2L = torch.stack((first.created(start, stop), second.created(start, stop)))
        for here_L, there_L, classes in zip(created_2L, created_2L.flip(0), only.values(), strict=True):
            classes.add((here_L & ~there_L).nonzero().squeeze(1) + start)
        class_M = created_2L.all(dim=0).nonzero().squeeze(1) + start
        rows_one, rows_two = first.read(class_M), second.read(class_M)
        for name, classes in columns.items():
            unlike_M = (~_same(rows_one[name], rows_two[name])).flatten(1).any(dim=1)
            if bool(unlike_M.any()):
                classes.add(class_M[unlike_M], _largest(rows_one[name][unlike_M], rows_two[name][unlike_M]))
    for where, classes in only.items():
        if classes.count:
            yield f"{table}: {classes.count} classes have rows in {where} only: {classes}"
    for name, classes in columns.items():
        if classes.count:
            yield (
                f"{table}: {name} differs in {classes.count} of {num_classes} classes, by at most "
                f"{classes.largest:.3g}: {classes}"
            )
