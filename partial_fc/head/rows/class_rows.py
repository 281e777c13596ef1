"""Access to a head's rows by class, for checkpoints.

M classes asked for, K rows of theirs, D feature width.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from partial_fc.head.rows.table import RowTable, initial_centres
from partial_fc.head.shard import Shard

if TYPE_CHECKING:
    from partial_fc.head.rows.copying import RowCopy


class Column(NamedTuple):
    """Shape and dtype of what one class has of a tensor: (D,), (sub_centres, D) or (1,) numbers of a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class ClassRows:
    """Reads and writes the rows of this rank's classes [start, stop): each created class has one entry of each column
    of `RowTable.row_state`."""

    def __init__(self, store: RowTable, shard: Shard, sub_centres: int):
        self.start, self.stop = shard.start, shard.stop
        self._store, self._sub_centres = store, sub_centres

    @property
    def columns(self) -> dict[str, Column]:
        return {name: Column(tuple(t.shape[1:]), t.dtype) for name, t in self.tables().items()}

    def tables(self) -> dict[str, Tensor]:
        """All columns as stored, (stop - start, ...) each; zeros where a class was never created. Not copies."""
        tables = self._store.row_state()
        if self._sub_centres == 1:
            return tables
        return {name: t.unflatten(0, (self.stop - self.start, self._sub_centres)) for name, t in tables.items()}

    def created(self, start: int, stop: int) -> Tensor:
        """Which of the classes [start, stop) have rows, bool (stop - start,): the others still are their start values,
        which need not be stored."""
        exists = self._store.exists_L.view(self.stop - self.start, self._sub_centres)
        return exists[start - self.start : stop - self.start].any(dim=1).cpu()

    def read(self, classes: Tensor | range) -> dict[str, Tensor]:
        """The rows of created classes, (M, ...) for each column: copies; of a range, views."""
        tables = self.tables()
        if isinstance(classes, range):
            return {name: t[classes.start - self.start : classes.stop - self.start] for name, t in tables.items()}
        return {name: t.index_select(0, (classes - self.start).to(t.device)) for name, t in tables.items()}

    def begin_copy(self) -> "CopiedRows | None":
        """Returns a copy of the rows as they are now, which `CopiedRows.finish` completes while training goes on; None
        where they lie on a device."""
        copy = self._store.begin_copy(self._sub_centres)
        return None if copy is None else CopiedRows(copy, self.start, self.stop, self.columns)

    def write(self, start: int, stop: int, class_M: Tensor, rows: dict[str, Tensor]) -> None:
        """Replaces the rows of classes [start, stop): class_M of them (ascending) get what `read` returned, in any
        dtype (rounded to nearest), the others become uncreated. The head's `load_facts` comes first."""
        subs = self._sub_centres
        row_K = ((class_M - self.start)[:, None] * subs + torch.arange(subs, device=class_M.device)).flatten()
        table = {name: t.reshape(len(row_K), t.shape[-1]) for name, t in rows.items()}
        self._store.load_rows((start - self.start) * subs, (stop - self.start) * subs, row_K, table)

    def write_centres(self, start: int, stop: int, class_M: Tensor, centre_M: Tensor) -> None:
        """Replaces the rows of classes [start, stop): class_M of them (ascending) start at these centres now, without
        optimizer state; the others become uncreated. centre_M: (M, D), for all sub-centres, or (M, sub_centres, D)."""
        columns = self.columns
        rows = {name: centre_M.new_zeros(1).expand(len(class_M), *c.shape) for name, c in columns.items()}
        rows["touched"] = rows["touched"] + self._store.steps_counted
        if centre_M.dim() <= len(columns["centres"].shape):
            centre_M = self._apart(class_M, centre_M)
        self.write(start, stop, class_M, {**rows, "centres": centre_M})

    def _apart(self, class_M: Tensor, centre_M: Tensor) -> Tensor:
        """Returns (M, sub_centres, D): the first sub-centre of a class there, the others some hundredths of a radian
        away. At one place rounding would choose among them, differently for each number of ranks."""
        subs, (M, D) = self._sub_centres, centre_M.shape
        row_K = (class_M[:, None] * subs + torch.arange(1, subs, device=class_M.device)).flatten()
        aside = initial_centres(row_K, D, self._store.seed).view(M, subs - 1, D).to(centre_M)
        length = centre_M.norm(dim=1)[:, None, None]
        return torch.cat([centre_M[:, None], centre_M[:, None] + 0.1 * length * aside], dim=1)


class CopiedRows:
    """A copy of the rows of classes [start, stop) at one moment. `read` is valid after `finish`."""

    def __init__(self, copy: "RowCopy", start: int, stop: int, columns: dict[str, Column]):
        self.start, self.stop, self.columns = start, stop, columns
        self._copy = copy

    def created(self, start: int, stop: int) -> Tensor:
        return self._copy.created_C[start - self.start : stop - self.start]

    def read(self, classes: Tensor | range) -> dict[str, Tensor]:
        """Returns views of the rows of adjacent created classes."""
        at = int(self._copy.place_C[int(classes[0]) - self.start]) if len(classes) else 0
        return {
            name: t.view(-1, *self.columns[name].shape)[at : at + len(classes)] for name, t in self._copy.copies.items()
        }

    def finish(self) -> None:
        """Copies the remaining rows, in any thread. Raises MemoryError."""
        self._copy.finish()
