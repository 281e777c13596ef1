"""The rows of one rank, class centres and their optimiser state: where they lie, in which dtype, and how they move.

A row is first made when it first takes part: its start value is a function of (seed, global row number), so rows never
touched take neither time nor memory (whole pages of zeros that the system has not handed out yet, or holes in a file).
Every place and both kinds of fetching give the same bits.

Letters: L rows of this rank, S rows that take part in a step, K a chunk of them, D feature width. A row's global number
is class number * sub_centres + its place within the class; local numbers count from this rank's first row.
"""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from partial_fc import keyed
from partial_fc.optim import catch_up as catching_up
from partial_fc.optim.rows import RowOptimizer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Storage:
    """How rows rest between steps. A step computes in float32 (float64 where dtype is float64), whatever the dtypes.

    bfloat16 is rounded stochastically: up or down with the probabilities that keep the expected value, so that
    updates far below its 8 bits still add up. float16 and start values are rounded to nearest.
    """

    dtype: torch.dtype = torch.float32  # of the centres: float32, bfloat16, float16 (float64 for checks)
    state_dtype: torch.dtype | None = (
        None  # of the (rows, D) state; None: as dtype. (rows, 1) state is float32
    )
    place: Literal["device", "host", "disk"] = "device"
    path: Path | None = None  # for place "disk": the folder

    def __post_init__(self) -> None:
        for name, dtype in (("dtype", self.dtype), ("state_dtype", self.state_dtype or self.dtype)):
            if dtype not in DTYPES:
                raise ValueError(
                    f"{name} of the centres is {dtype}; expected one of {', '.join(map(str, DTYPES))}"
                )
        if self.place not in ("device", "host", "disk"):
            raise ValueError(f"the centres' place is {self.place!r}; expected device, host or disk")
        if (self.place == "disk") != (self.path is not None):
            raise ValueError(
                f"the centres' place is {self.place!r} and their path {self.path}; place disk needs the folder of a "
                "fast local disk, and no other place takes one"
            )


@dataclass(frozen=True)
class SGDFields:
    """What a fused SGD step reads and writes, for the rows of one step. Row r of bfloat16 tensors is rounded with
    keyed.rounding_noise(first_row + r, D, key); every row that is written gets touched_L1[r] = touched."""

    centre_LD: Tensor
    momentum_LD: Tensor
    touched_L1: Tensor  # int32
    touched: int
    first_row: int
    centre_key: int
    momentum_key: int


def initial_centres(row_M: Tensor, embedding_size: int, seed: int) -> Tensor:
    """The start values of rows by global number, N(0, 0.01): float32 (M, D), on row_M's device."""
    return keyed.normal(row_M, embedding_size, keyed.fold(seed, *b"centres")).mul_(0.01)


def round_stochastically(x_KD: Tensor, row_K: Tensor, key: int) -> Tensor:
    """float32 -> bfloat16 of the same shape: the upper half of (bits + noise), where the noise of a row and column is
    that of keyed.rounding_noise. What is not finite only loses its lower half. row_K: global row numbers."""
    bits = keyed.rounding_noise(row_K, x_KD.shape[1], key)
    bits.masked_fill_(x_KD.isfinite().logical_not_(), 0).add_(x_KD.view(torch.int32))
    return bits.view(torch.int16)[:, 1::2].view(torch.bfloat16)


class Centres:
    """Rows first_row to first_row + num_rows - 1 (global numbers), and one optimiser for all of them.

    In each step, in this order: fetch, then update for every chunk of what was fetched. Steps count from 0. catch_up:
    "none": a row lives only in the steps that touch it; "exact": before a row takes part, it is moved as the dense
    optimiser would have moved it since (optim/catch_up.py); update is then to be called in every step, with
    begin = end = 0 where no row takes part.
    """

    def __init__(
        self,
        first_row: int,
        num_rows: int,
        embedding_size: int,
        seed: int,
        optimizer: RowOptimizer,
        storage: Storage,
        device: torch.device | str,
        catch_up: Literal["none", "exact"] = "none",
    ):
        if catch_up not in ("none", "exact"):
            raise ValueError(f"catch_up is {catch_up!r}; expected none or exact")
        self.first_row, self.num_rows, self.embedding_size, self.seed = (
            first_row,
            num_rows,
            embedding_size,
            seed,
        )
        self.optimizer, self.storage, self.device = optimizer, storage, torch.device(device)
        self._work_dtype = torch.float64 if storage.dtype == torch.float64 else torch.float32
        # Rows that a step works on at a time: few enough for a CPU's cache, many for a GPU.
        self._chunk = max(1, (1 << 17 if self.device.type == "cpu" else 1 << 24) // embedding_size)
        self._catch_up = catching_up.make(optimizer, [], self.device) if catch_up == "exact" else None
        # By name, the centres first: a name's place is the stream of its rounding noise.
        self._columns = {"centres": (embedding_size, storage.dtype)}
        for name, width in optimizer.state_widths().items():
            row = (embedding_size, storage.state_dtype or storage.dtype)
            self._columns[name] = row if width == "row" else (1, self._work_dtype)
        columns = {**self._columns, "touched": (1, torch.int32)}
        self._tables = {name: zeros(num_rows, *column, self.device) for name, column in columns.items()}
        self._exists_L = torch.zeros(num_rows, dtype=torch.bool, device=self.device)
        self._num_missing = num_rows

    @property
    def centre_LD(self) -> Tensor:
        """The centres as they are stored; rows that do not exist yet are zeros."""
        return self._tables["centres"]

    def all_rows(self) -> Tensor:
        """The centres with every row made: from then on they take all their memory."""
        self._create_missing(None)
        return self.centre_LD

    def fetch(self, row_S: Tensor | None, step: int) -> tuple[Tensor, Tensor | None]:
        """Readies the rows row_S (local numbers, ascending, each once; None: all) for a step: makes the missing ones,
        catches up. Returns a table, and the rows' places in it (None: the table is those rows, in order)."""
        self._create_missing(row_S)
        self._bring_up(self._tables, row_S, row_S, step)
        return self.centre_LD, row_S

    def update(
        self, row_K: Tensor | None, begin: int, end: int, grad_KD: Tensor, lr: float, step: int
    ) -> None:
        """One step of the optimiser for rows [begin, end) of those fetched. row_K: that part of row_S, None where
        row_S was None. grad_KD: their gradient, floating; it is overwritten."""
        self._record(lr, step)
        for low in range(begin, end, self._chunk):
            part = slice(low - begin, min(low + self._chunk, end) - begin)
            at = slice(begin + part.start, begin + part.stop) if row_K is None else row_K[part]
            centre_KD, state = self._load(self._tables, at)
            self.optimizer.step(centre_KD, state, grad_KD[part].to(self._work_dtype), lr)
            self._store(self._tables, at, at, centre_KD, state, step)

    def sgd_fields(self, step: int, lr: float) -> SGDFields:
        """For code that does a step of RowSGD by itself, on tables that it indexes in place, instead of `update`."""
        self._record(lr, step)
        return SGDFields(
            self._tables["centres"],
            self._tables["momentum"],
            self._tables["touched"],
            touched=step + 1,
            first_row=self.first_row,
            centre_key=keyed.rounding_key(self.seed, 0, step),
            momentum_key=keyed.rounding_key(self.seed, 1, step),
        )

    def finish(self, step: int) -> None:
        """Makes and catches up all rows: the table is then the dense optimiser's after `step` steps."""
        self.fetch(None, step)

    def row_state(self) -> dict[str, Tensor]:
        """All that belongs to the rows, as stored and one row for each: "centres", the optimiser's state by name, and
        "touched", int32 (rows, 1): how many steps the row's values stand for, which is the step after the last that
        it took part in or was caught up to; 0: never. A row that was never made is zeros throughout; whoever loads
        it makes its start value when it is needed. Not copies."""
        return self._tables

    def load_row_state(self, rows: dict[str, Tensor]) -> None:
        """Takes over what `row_state` gave, for this rank's rows; other dtypes are converted (to nearest)."""
        if rows.keys() != self._tables.keys():
            raise ValueError(
                f"row state {sorted(rows)}; expected {sorted(self._tables)} for {self.optimizer}"
            )
        for name, table in self._tables.items():
            if rows[name].shape != table.shape:
                raise ValueError(f"{name} has shape {tuple(rows[name].shape)}; expected {tuple(table.shape)}")
        for low in range(0, self.num_rows, self._chunk):
            part = slice(low, low + self._chunk)
            made = (
                (rows["touched"][part] > 0) | (rows["centres"][part] != 0).any(dim=1, keepdim=True)
            ).squeeze(1)
            made = made.to(self._exists_L.device)
            # Rows that are made neither here nor there are not written: they keep taking no memory.
            at = low + (made | self._exists_L[part]).nonzero().squeeze(1)
            for name, table in self._tables.items():
                table.index_copy_(0, at, rows[name].index_select(0, at.to(rows[name].device)).to(table))
            self._exists_L[part] = made
        self._num_missing = self.num_rows - int(self._exists_L.sum())

    def schedule_state(self) -> dict[str, Any]:
        """What catching up needs besides the rows, as JSON: the learning rates of all steps; {} without catch-up."""
        if self._catch_up is None:
            return {}
        return {"optimizer": repr(self.optimizer), "rates": list(self._catch_up.rates)}

    def load_schedule_state(self, state: dict[str, Any]) -> None:
        if self._catch_up is None:
            return
        if not state:
            raise ValueError(
                "the centres were trained without catch-up, so their past learning rates are not known; "
                "go on without catch-up, or start anew"
            )
        if state["optimizer"] != repr(self.optimizer):
            raise ValueError(
                f"catch-up would apply {self.optimizer} to steps made with {state['optimizer']}; "
                "go on with those settings, or without catch-up"
            )
        self._catch_up = catching_up.make(self.optimizer, state["rates"], self.device)

    # ---- how

    def _create_missing(self, row_S: Tensor | None) -> None:
        if not self._num_missing:
            return
        missing_M = (~self._exists_L).nonzero().squeeze(1) if row_S is None else row_S[~self._exists_L[row_S]]
        for row_K in missing_M.split(self._chunk):
            start_KD = initial_centres(row_K + self.first_row, self.embedding_size, self.seed)
            self.centre_LD.index_copy_(0, row_K, start_KD.to(self.storage.dtype))
        self._exists_L[missing_M] = True
        self._num_missing -= len(missing_M)

    def _record(self, lr: float, step: int) -> None:
        if self._catch_up is None:
            return
        known = len(self._catch_up.rates)
        if step == known:
            self._catch_up.record(lr)
        elif step != known - 1 or lr != self._catch_up.rates[-1]:
            raise ValueError(
                f"update of step {step} with learning rate {lr} after {known} steps; catch-up needs every step once, "
                "in order, and one rate for all of its rows"
            )

    def _bring_up(
        self, tables: dict[str, Tensor], at_S: Tensor | None, row_S: Tensor | None, step: int
    ) -> None:
        """Catches up the rows at at_S of the tables, whose local numbers are row_S; None: all, in order."""
        if self._catch_up is None:
            return
        if step != len(self._catch_up.rates):
            raise ValueError(
                f"step {step} after {len(self._catch_up.rates)} steps; catch-up needs every step"
            )
        touched_S = tables["touched"].squeeze(1)
        if at_S is not None:
            touched_S = touched_S.index_select(0, at_S)
        late = (touched_S < step).nonzero().squeeze(1)
        late = late[touched_S[late].argsort(stable=True)]
        for late_K in late.split(self._chunk) if len(late) else ():
            at_K = late_K if at_S is None else at_S[late_K]
            row_K = late_K if row_S is None else row_S[late_K]
            centre_KD, state = self._load(tables, at_K)
            self._catch_up.apply(centre_KD, state, touched_S[late_K], step)
            # With the noise of the step before: this row did not use it then, and will use this step's own now.
            self._store(tables, at_K, row_K, centre_KD, state, step - 1)

    def _load(self, tables: dict[str, Tensor], at: Tensor | slice) -> tuple[Tensor, dict[str, Tensor]]:
        """Working copies of centres and state; the rows themselves where there is nothing to select or to convert."""
        work = {}
        for name in self._columns:
            rows = tables[name][at] if isinstance(at, slice) else tables[name].index_select(0, at)
            work[name] = rows.to(self._work_dtype)
        return work.pop("centres"), work

    def _store(
        self,
        tables: dict[str, Tensor],
        at: Tensor | slice,
        row: Tensor | slice,
        centre_KD: Tensor,
        state: dict[str, Tensor],
        step: int,
    ) -> None:
        """Puts working copies back as they stand after `step`. row: local numbers of the rows that lie at `at`."""
        if isinstance(row, slice):
            row = torch.arange(row.start, row.stop, device=self.device)
        touched = torch.full_like(row, step + 1, dtype=torch.int32)[:, None]
        work = {"centres": centre_KD, **state, "touched": touched}
        for stream, (name, rows) in enumerate(work.items()):
            table = tables[name]
            if table.dtype == torch.bfloat16:
                key = keyed.rounding_key(self.seed, stream, step)
                rows = round_stochastically(rows.float(), row + self.first_row, key)
            if not isinstance(at, slice):
                table.index_copy_(0, at, rows.to(table.dtype))
            elif table.dtype != self._work_dtype:  # else they are the table's own rows
                table[at] = rows


def zeros(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(num_rows, width) zeros. In ordinary memory they begin on a page, and pages take no memory until written to."""
    num_bytes = num_rows * width * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(num_rows, width, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(num_rows, width)
