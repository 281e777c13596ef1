"""The rows of a checkpoint as of its last step, for readers that use centres as weights.

With --head-catch-up exact a stored row lags behind: decay and momentum of the steps since it last took part are applied
when it takes part again. Readers that do not train get their rows from here, equal to `PartialFC.centres`, by the
learning rates in the manifest. Tools that copy rows copy them as stored.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partial_fc.checkpoint.head_state import check_same_head, tables_in
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.rows import Part, StoredRows, cut
from partial_fc.head.protocol import Head
from partial_fc.head.rows import catch_up
from partial_fc.head.rows.class_rows import Column
from partial_fc.head.rows.optimizers import from_repr

_CHUNK = 1 << 20  # numbers of each column that are processed at a time


class RowsNow:
    """Stored rows, each brought up to the checkpoint's last step when it is read. The files do not change."""

    def __init__(self, stored: StoredRows, schedule: dict[str, Any], where: str):
        """schedule: of the manifest; {}: no row lags behind."""
        self.start, self.stop = stored.start, stored.stop
        self._stored, self._where = stored, where
        self._num_steps, self._catch_up, self.catches_up = 0, None, bool(schedule)
        if not schedule:
            return
        rates, first = schedule["rates"], schedule.get("first", 0)
        optimizer = from_repr(schedule["optimizer"])
        self._num_steps = first + len(rates)
        self._catch_up = catch_up.make(optimizer, torch.device("cpu"), rates, first)

    @property
    def columns(self) -> dict[str, Column]:
        return self._stored.columns

    def created(self, start: int, stop: int) -> Tensor:
        return self._stored.created(start, stop)

    def read(self, classes: Tensor | range, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Returns the rows of these classes. names: the columns to read; None: all."""
        if self._catch_up is None:
            return self._stored.read(classes, names)
        rows = self.now(self._stored.read(classes))
        return {name: t for name, t in rows.items() if names is None or name in names}

    def parts(self) -> Iterator[Part]:
        """Yields the rows, one file after the other."""
        for part in self._stored.parts():
            yield part if self._catch_up is None else replace(part, tensors={**part.tensors, **self.now(part.rows)})

    def now(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Converts rows as stored, all columns of them, to those after all steps; copies if something changes. Raises
        ValueError if they stand for more steps than were made."""
        if self._catch_up is None or not len(rows["centres"]):
            return rows
        table = {name: t.reshape(-1, t.shape[-1]) for name, t in rows.items()}  # a row for each sub-centre
        touched_L = table["touched"].squeeze(1).long()
        least, most = int(touched_L.min()), int(touched_L.max())
        if least < 0 or most > self._num_steps:
            raise ValueError(
                f"{self._where}: its rows stand for {least} to {most} steps; expected 0 to {self._num_steps}, of which "
                "manifest.json has the learning rates"
            )
        late, since = self._catch_up.late(touched_L)
        if not len(late):
            return rows
        table = {name: t.clone() for name, t in table.items()}
        work_dtype = torch.float64 if table["centres"].dtype == torch.float64 else torch.float32
        chunk = max(1, _CHUNK // table["centres"].shape[1])
        for late_K, since_K in zip(late.split(chunk), since.split(chunk), strict=True):
            state = {name: t[late_K].to(work_dtype) for name, t in table.items() if name != "touched"}
            centre_KD = state.pop("centres")
            self._catch_up.apply(centre_KD, state, since_K)
            for name, t in {"centres": centre_KD, **state}.items():
                table[name][late_K] = t.to(table[name].dtype)
        table["touched"].fill_(self._num_steps)
        return {name: t.view_as(rows[name]) for name, t in table.items()}


def rows_now(checkpoint: Checkpoint, start: int = 0, stop: int | None = None, table: str = "") -> RowsNow:
    """Returns a table's rows of classes [start, stop) after the last step; stop None: to the end. Raises ValueError."""
    facts = tables_in(checkpoint.manifest, checkpoint.where)[table]
    return RowsNow(checkpoint.rows(start, stop, table), facts["head"]["schedule"], checkpoint.where)


def load_centres(checkpoint: Checkpoint, head: Head) -> None:
    """Loads only the centres of its class ranges into the head. Raises ValueError for another head's."""
    check_same_head(checkpoint.manifest, head, checkpoint.where)
    for name, table in head.tables().items():
        start, stop = table.rows.start, table.rows.stop
        for part in cut(rows_now(checkpoint, start, stop, name), start, stop):
            table.rows.write_centres(part.start, part.stop, part.class_N, part.tensors["centres"])
