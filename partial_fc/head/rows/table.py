"""The table of one rank's rows: class centres and their optimizer state, their storage and update.

A row is created when it first takes part: its start value is a function of (seed, global row number), so rows never
touched take neither time nor memory (whole pages of zeros that the system has not handed out yet).
Every storage and both kinds of fetching give the same bits.

Letters: L rows of this rank, S rows that take part in a step, K a chunk of them, D feature width. A row's global number
is class number * sub_centres + its number within the class; local numbers count from this rank's first row.
"""

from collections.abc import Iterator
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor

from partial_fc import counter_rng
from partial_fc.head.rows import catch_up as catching_up
from partial_fc.head.rows.copying import RowCopy
from partial_fc.head.rows.optimizers import RowAdamW, RowOptimizer
from partial_fc.head.rows.staging import Staging
from partial_fc.head.rows.storage import Storage, round_stochastically, zeros


def initial_centres(row_M: Tensor, embedding_size: int, seed: int) -> Tensor:
    """Returns the start values of rows by global number, N(0, 0.01): float32 (M, D), on row_M's device."""
    return counter_rng.normal(row_M, embedding_size, counter_rng.derive_key(seed, *b"centres")).mul_(0.01)


class RowTable:
    """Stores the rows first_row to first_row + num_rows - 1 (global numbers) and updates them with one optimizer.

    In each step, in this order: fetch, then update for every chunk of what was fetched. Steps count from 0. catch_up:
    "none": a row lives only in the steps that touch it; "exact": before a row takes part, it is moved as the dense
    optimizer would have moved it since (rows/catch_up.py); update is then to be called in every step, with
    begin = end = 0 where no row takes part. After a step that moved all rows nothing lags behind.
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
        if isinstance(optimizer, RowAdamW) and (storage.state_dtype or storage.dtype) == torch.float16:
            raise ValueError(
                "AdamW's state in float16: squares of gradients are below what it holds, and rows would be thrown far "
                "away; give state_dtype bfloat16 or float32"
            )
        self.first_row, self.num_rows, self.embedding_size, self.seed = first_row, num_rows, embedding_size, seed
        self.optimizer, self.storage, self.device = optimizer, storage, torch.device(device)
        self._work_dtype = torch.float64 if storage.dtype == torch.float64 else torch.float32
        # Rows that a step works on at a time: few enough for a CPU's cache, many for a GPU.
        self._chunk = max(1, (1 << 17 if self.device.type == "cpu" else 1 << 24) // embedding_size)
        self._catches_up = catch_up == "exact"
        self._catch_up = catching_up.make(optimizer, self.device) if self._catches_up else None
        self._takes_all = False  # whether all rows of all ranks were fetched for the last step
        self._num_updated = 0  # rows that it moved
        self._centres_now: Tensor | None = None  # a copy, until rows change
        # By name, the centres first: a name's index is the stream of its rounding noise.
        self._columns = {"centres": (embedding_size, storage.dtype)}
        for name, width in optimizer.state_widths().items():
            row = (embedding_size, storage.state_dtype or storage.dtype)
            self._columns[name] = row if width == "row" else (1, self._work_dtype)
        # Where rows lie, and whether the device works on them there or on copies of those that take part.
        home = self.device if storage.place == "device" else torch.device("cpu")
        columns = {**self._columns, "touched": (1, torch.int32)}
        self._tables = {name: zeros(num_rows, *column, home) for name, column in columns.items()}
        self.exists_L = torch.zeros(num_rows, dtype=torch.bool, device=home)  # which rows are created
        self._num_missing = num_rows
        self._staging = Staging(self._tables, self.device) if indexes_copies(storage, self.device) else None
        self._fetched = -1  # the step of the last fetch
        # Copies that may not be made yet, and whether rows were fetched that are still to be updated.
        self._row_copies: WeakSet[RowCopy] = WeakSet()
        self._is_fetched = False

    @property
    def centre_LD(self) -> Tensor:
        """The centres as they are stored; rows that do not exist yet are zeros."""
        return self._tables["centres"]

    def all_rows(self) -> Tensor:
        """The centres with every row created: from then on they take all their memory. Not a copy."""
        self._drain()
        self._create_missing(None)
        return self.centre_LD

    def centres_now(self) -> Tensor:
        """Returns the centres after all steps so far, (L, D). A copy if rows lag behind, kept until rows change: the
        table stays as it is, so that reading changes no later result."""
        table_LD = self.all_rows()
        if self._catch_up is None or self._is_current():
            return table_LD
        if self._centres_now is not None:
            return self._centres_now
        late, since = self._catch_up.late(self._tables["touched"].squeeze(1))
        if not len(late):
            return table_LD
        now_LD = table_LD.clone()
        for late_K, _, centre_KD, _ in self._caught_up(self._tables, late, late, since):
            now_LD.index_copy_(0, late_K, centre_KD.to(now_LD))
        self._centres_now = now_LD
        return now_LD

    def rows_in_place(self) -> Tensor:
        """Returns the centres where they lie, (L, D), for code that reads or overwrites them: all are created and
        brought up to now."""
        table_LD = self.all_rows()
        for copy in self._row_copies:
            copy.want(None)
            copy.settle()
        self._centres_now = None
        if self._staging is not None:
            self._staging.forget()
        self._bring_up(self._tables, None, None, self.steps_counted)
        return table_LD

    def start_now(self, begin: int) -> None:
        """Creates rows begin to the last. Unlike one that was never fetched, they are caught up on no past step."""
        if self._catch_up is not None:
            self._create_missing(torch.arange(begin, self.num_rows))
            self._tables["touched"][begin:] = self.steps_counted

    @property
    def steps_counted(self) -> int:
        """How many steps a row stands for that does not lag behind; 0 without catch-up."""
        return 0 if self._catch_up is None else self._catch_up.num_steps

    def fetch(self, row_S: Tensor | None, step: int) -> tuple[Tensor, Tensor | None]:
        """Prepares the rows row_S (local numbers, ascending, each once; None: all) for a step: creates missing ones and
        catches up. Returns a table, and the rows' positions in it (None: the table is those rows, in order)."""
        for copy in self._row_copies:
            copy.want(row_S)
        if self._catch_up is not None:
            self._settle()
            self._is_current()  # of the last step
        self._is_fetched = True
        self._takes_all = row_S is None
        self._create_missing(row_S)
        if self._staging is None:
            self._bring_up(self._tables, row_S, row_S, step)
            return self.centre_LD, row_S
        if row_S is None:
            row_S = torch.arange(self.num_rows, device=self.device)
        self._staging.stage(row_S, same_step=step == self._fetched)
        self._fetched = step
        copies = self._staging.copies
        self._bring_up(copies.tables, None, copies.row_S, step)
        return copies.tables["centres"], None if len(copies.row_S) == len(row_S) else copies.positions(row_S)[0]

    @property
    def can_prefetch(self) -> bool:
        """Whether rows are stored where fetching them takes time."""
        return self._staging is not None

    def prefetch(self, row_S: Tensor) -> None:
        """Starts to fetch rows of the next step (as far as they are known: its negatives), if that takes time. Changes
        no result."""
        if self._staging is not None:
            row_S = row_S.cpu()
            self._staging.prefetch(row_S[self.exists_L[row_S]])

    def update(self, row_K: Tensor | None, begin: int, end: int, grad_KD: Tensor, lr: float, step: int) -> None:
        """Makes one optimizer step for rows [begin, end) of those fetched. row_K: that part of row_S, None where row_S
        was None. grad_KD: their gradient, floating; it is overwritten."""
        self._settle()
        self._record(lr, step, end - begin)
        tables = self._tables if self._staging is None else self._staging.copies.tables
        for low in range(begin, end, self._chunk):
            part = slice(low - begin, min(low + self._chunk, end) - begin)
            row = at = slice(begin + part.start, begin + part.stop) if row_K is None else row_K[part]
            if self._staging is not None and isinstance(row, Tensor):
                at, present = self._staging.copies.positions(row)
                assert present.all(), "update of rows that were not fetched"
            centre_KD, state = self._load(tables, at)
            self.optimizer.step(centre_KD, state, grad_KD[part].to(self._work_dtype), lr)
            self._store(tables, at, row, centre_KD, state, step)

    def begin_fused_update(self, num_rows: int, lr: float, step: int) -> dict[str, int]:
        """For code that does a step of the optimizer by itself, instead of `update`, in the tables of `row_state`,
        where `fetch` gave centre_LD. Each of the num_rows rows r that it writes gets touched = step + 1 and is rounded,
        in bfloat16 tables, with counter_rng.rounding_noise(first_row + r, D, key). Returns these keys by table."""
        assert self._staging is None
        self._settle()
        self._record(lr, step, num_rows)
        return {name: counter_rng.rounding_key(self.seed, i, step) for i, name in enumerate(self._columns)}

    def begin_copy(self, group: int) -> RowCopy | None:
        """A copy of the rows as they are now, still to be made, by another thread while steps go on; None where they
        lie on a device. group: rows that belong together."""
        if self.exists_L.device.type != "cpu" or self._staging is not None:
            return None
        copy = RowCopy(self._tables, self.exists_L, group)
        if self._is_fetched:  # which rows are to be updated next is not known any more
            copy.finish()
        else:
            self._row_copies.add(copy)
        return copy

    def _settle(self) -> None:
        """Before rows are changed."""
        self._is_fetched, self._centres_now = False, None
        for copy in self._row_copies:
            copy.settle()

    def row_state(self) -> dict[str, Tensor]:
        """Returns all tensors of the rows, as stored, one row for each: "centres", the optimizer's state by name, and
        "touched", int32 (rows, 1): how many steps the row's values stand for, which is the step after the last that it
        took part in or was caught up to; 0: never. A row that was never created is zeros throughout; whoever loads it
        makes its start value when it is needed. Not copies."""
        self._drain()
        return self._tables

    def close(self) -> None:
        """Stops threads; the table cannot be used afterwards."""
        if self._staging is not None:
            self._staging.close()
        self._tables = {}

    def load_row_state(self, rows: dict[str, Tensor]) -> None:
        """Loads what `row_state` returned, for this rank's rows; other dtypes are converted (to nearest). Rows that are
        zeros throughout count as never created."""
        self._check_names(rows)
        for name, table in self._tables.items():
            if rows[name].shape != table.shape:
                raise ValueError(f"{name} has shape {tuple(rows[name].shape)}; expected {tuple(table.shape)}")
        size = 16 * self._chunk
        for low in range(0, self.num_rows, size):
            part = {name: tensor[low : low + size] for name, tensor in rows.items()}
            made = ((part["touched"] > 0) | (part["centres"] != 0).any(dim=1, keepdim=True)).squeeze(1)
            at = made.nonzero().squeeze(1)
            end = min(low + size, self.num_rows)
            self.load_rows(low, end, at + low, {name: t.index_select(0, at) for name, t in part.items()})

    def load_rows(self, begin: int, end: int, row_M: Tensor, rows: dict[str, Tensor]) -> None:
        """Rows [begin, end) become: row_M of them (ascending local numbers) what `row_state` gave for those, in any
        dtype (converted to nearest), the others what they are before they are created."""
        self._check_names(rows)
        if self._staging is not None:
            self._staging.forget()
        for copy in self._row_copies:
            copy.want(None)
        self._settle()
        size = 16 * self._chunk
        # Only rows that are there are written, here or in what is loaded: the others keep taking no memory.
        for row_K in (self.exists_L[begin:end].nonzero().squeeze(1) + begin).split(size):
            nothing = torch.zeros((), dtype=self._work_dtype)
            self._write(row_K, {n: nothing.expand(len(row_K), t.shape[1]) for n, t in self._tables.items()})
        self._num_missing += int(self.exists_L[begin:end].sum())
        self.exists_L[begin:end] = False
        row_M = row_M.to(self.exists_L.device)
        for low in range(0, len(row_M), size):
            self._write(row_M[low : low + size], {name: t[low : low + size] for name, t in rows.items()})
        self.exists_L[row_M] = True
        self._num_missing -= len(row_M)

    def _check_names(self, rows: dict[str, Tensor]) -> None:
        if rows.keys() != self._tables.keys():
            raise ValueError(f"row state {sorted(rows)}; expected {sorted(self._tables)} for {self.optimizer}")

    def schedule_state(self) -> dict[str, Any]:
        """Returns what catching up needs besides the rows, as JSON: the learning rates of the steps from `first` on; {}
        without it."""
        if self._catch_up is None:
            return {}
        self._is_current()
        return {"optimizer": repr(self.optimizer), "first": self._catch_up.first, "rates": list(self._catch_up.rates)}

    def load_schedule_state(self, state: dict[str, Any]) -> bool:
        """Loads what `schedule_state` returned. Where that is {}, past learning rates are not known, and rows rest from
        now on as they did before; returns whether that is a change."""
        catch_up = catching_up.make(self.optimizer, self.device) if self._catches_up else None
        self._num_updated = 0
        if catch_up is None or not state:
            self._catch_up = None
            return catch_up is not None
        if state["rates"] and state["optimizer"] != repr(self.optimizer):
            raise ValueError(
                f"catch-up would apply {self.optimizer} to steps made with {state['optimizer']}; "
                "go on with those settings, or without catch-up"
            )
        self._catch_up = catching_up.make(self.optimizer, self.device, state["rates"], state.get("first", 0))
        return False

    def _create_missing(self, row_S: Tensor | None) -> None:
        if not self._num_missing:
            return
        if row_S is None:
            missing_M = (~self.exists_L).nonzero().squeeze(1)
        else:
            row_S = row_S.to(self.exists_L.device)
            missing_M = row_S[~self.exists_L[row_S]]
        for row_K in missing_M.split(self._chunk) if len(missing_M) else ():
            global_K = row_K.to(self.device) + self.first_row  # made on the device, wherever they lie
            self._write(row_K, {"centres": initial_centres(global_K, self.embedding_size, self.seed)})
        self.exists_L[missing_M] = True
        self._num_missing -= len(missing_M)

    def _write(self, row_K: Tensor, rows: dict[str, Tensor]) -> None:
        """Writes rows (ascending numbers) to where they are kept. Other tables than those named are zeros there."""
        for name, tensor in rows.items():
            self._tables[name].index_copy_(0, row_K, tensor.to(self._tables[name]))

    def _drain(self) -> None:
        if self._staging is not None:
            self._staging.drain()

    def _record(self, lr: float, step: int, num_rows: int) -> None:
        """Counts the step where this is its first update, and the rows that it moves."""
        if self._catch_up is None:
            return
        if step == self._catch_up.num_steps:
            self._is_current()
            self._catch_up.record(lr)
            self._num_updated = 0
        elif step != self._catch_up.num_steps - 1 or [lr] != self._catch_up.rates[-1:]:
            raise ValueError(
                f"update of step {step} with learning rate {lr} after {self._catch_up.num_steps} steps; catch-up needs "
                "every step once, in order, and one rate for all of its rows"
            )
        self._num_updated += num_rows

    def _is_current(self) -> bool:
        """Whether no row of any rank lags behind for certain, as the last step moved them all: then older ones are
        forgotten."""
        assert self._catch_up is not None
        if self._catch_up.rates and self._takes_all and self._num_updated == self.num_rows:
            self._catch_up.forget()
        return not self._catch_up.rates

    def _bring_up(self, tables: dict[str, Tensor], at_S: Tensor | None, row_S: Tensor | None, step: int) -> None:
        """Catches up the rows at at_S of the tables, whose local numbers are row_S; None: all, in order."""
        if self._catch_up is None:
            return
        if step != self._catch_up.num_steps:
            raise ValueError(f"step {step} after {self._catch_up.num_steps} steps; catch-up needs every step")
        if self._is_current():
            return
        # With the noise of the step before: a row that lags behind did not use it then, and will use this step's own.
        keys = {name: counter_rng.rounding_key(self.seed, i, step - 1) for i, name in enumerate(self._columns)}
        if self._catch_up.in_place(tables, at_S, None if at_S is row_S else row_S, self.first_row, keys):
            return
        touched_S = tables["touched"].squeeze(1)
        if at_S is not None:
            touched_S = touched_S.index_select(0, at_S)
        late, since = self._catch_up.late(touched_S)
        if not len(late):
            return
        at, row = (late if each is None else each[late] for each in (at_S, row_S))
        for at_K, row_K, centre_KD, state in self._caught_up(tables, at, row, since):
            self._store(tables, at_K, row_K.to(self.device), centre_KD, state, step - 1)

    def _caught_up(
        self, tables: dict[str, Tensor], at: Tensor, row: Tensor, since: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]]:
        """Yields working copies, on the device, of rows that lag behind since these steps, caught up: (where they lie
        in the tables, their local numbers, centres, state)."""
        assert self._catch_up is not None
        for at_K, row_K, since_K in zip(*(each.split(self._chunk) for each in (at, row, since)), strict=True):
            centre_KD, state = self._load(tables, at_K)
            centre_KD, state = centre_KD.to(self.device), {name: t.to(self.device) for name, t in state.items()}
            self._catch_up.apply(centre_KD, state, since_K.to(self.device))
            yield at_K, row_K, centre_KD, state

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
                key = counter_rng.rounding_key(self.seed, stream, step)
                rows = round_stochastically(rows.float(), row + self.first_row, key)
            if not isinstance(at, slice):
                table.index_copy_(0, at, rows.to(table))
            elif table.dtype != self._work_dtype:  # else they are the table's own rows
                table[at] = rows


def indexes_copies(storage: Storage, device: torch.device) -> bool:
    """Says whether the device works on copies of rows, because it cannot index them where they lie."""
    return storage.place != "device" and device.type != "cpu"
