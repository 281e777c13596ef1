"""Staging: copies of a step's active rows on the device, for tables that it cannot index.

What a step changed goes back while the next one runs, and the rows of the next one come while this one runs, both in
one thread, in the order in which they were asked for. Rows that were fetched ahead and then changed by this step are
taken from this step's copies, so that fetching ahead changes no bit.
"""

from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from partial_fc.accessories import threads


@dataclass(frozen=True)
class Copies:
    """Copies of rows on the device."""

    row_S: Tensor  # int64, ascending, each once; on the device
    home_S: Tensor  # the same where the tables lie
    tables: dict[str, Tensor]  # name -> (S, width) on the device

    def positions(self, row_K: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (the position in row_S of each of row_K, which of them are in it)."""
        if not len(self.row_S):
            return torch.zeros_like(row_K), torch.zeros_like(row_K, dtype=torch.bool)
        position_K = torch.searchsorted(self.row_S, row_K).clamp_(max=len(self.row_S) - 1)
        return position_K, self.row_S[position_K] == row_K


class Staging:
    """Copies rows to the device and back. home: name -> (L, width) tables in ordinary memory."""

    def __init__(self, home: dict[str, Tensor], device: torch.device):
        self._home, self._device = home, device
        nothing = torch.empty(0, dtype=torch.int64)
        tables = {name: table[:0].to(device) for name, table in home.items()}
        self._none = Copies(nothing.to(device), nothing, tables)
        self.copies = self._none
        self._ahead: Future[Copies] | None = None
        self._going_back: Future[None] | None = None
        self._worker = threads(1, "centres")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stage(self, row_S: Tensor, same_step: bool) -> None:
        """Makes `copies` those of row_S, and if same_step (one more fetch in it) also of the rows that they had."""
        before, ahead = self.copies, self._none
        self._wait()  # for what went back before; what goes back from now on are other rows than those read here
        if same_step:
            row_S = torch.unique(torch.cat((before.row_S, row_S)))
        else:
            self._going_back = self._worker.submit(self._write_back, before, self._event())
            if self._ahead is not None:
                ahead, self._ahead = self._ahead.result(), None
                self._record_use(ahead)
        tables = {name: t.new_empty(len(row_S), t.shape[1]) for name, t in before.tables.items()}
        missing_S = torch.ones_like(row_S, dtype=torch.bool)
        for source in (before, ahead):  # in this order: `before` has what this step changed
            position_S, present_S = source.positions(row_S)
            present_S &= missing_S
            missing_S &= ~present_S
            at, position = present_S.nonzero().squeeze(1), position_S[present_S]
            for name, table in tables.items():
                table.index_copy_(0, at, source.tables[name].index_select(0, position))
        home_S = row_S.cpu()
        at = missing_S.nonzero().squeeze(1)
        rest = self._gather(home_S[missing_S.cpu()])
        for name, table in tables.items():
            table.index_copy_(0, at, rest[name])
        self.copies = Copies(row_S, home_S, tables)

    def prefetch(self, row_P: Tensor) -> None:
        """Starts to copy rows for the next step; row_P: int64, ascending, each once, where the tables lie."""
        self._ahead = self._worker.submit(self._fetch_ahead, row_P)

    def drain(self) -> None:
        """Waits until all changed copies are written to the tables."""
        self._wait()
        self._write_back(self.copies, self._event())

    def forget(self) -> None:
        """Drops the copies, for tables that have changed."""
        self._wait()
        if self._ahead is not None:
            self._ahead.result()
        self._ahead, self.copies = None, self._none

    def close(self) -> None:
        self._worker.shutdown()

    def _wait(self) -> None:
        if self._going_back is not None:
            self._going_back.result()
            self._going_back = None

    def _fetch_ahead(self, row_P: Tensor) -> Copies:
        with self._side_stream():
            copies = Copies(row_P.to(self._device), row_P, self._gather(row_P))
            if self._stream is not None:
                self._stream.synchronize()
        return copies

    def _record_use(self, copies: Copies) -> None:
        """Keeps the side stream from reusing memory that this stream may still read."""
        if self._stream is not None:
            for tensor in (copies.row_S, *copies.tables.values()):
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def _gather(self, row_M: Tensor) -> dict[str, Tensor]:
        rows = {}
        for name, table in self._home.items():
            buffer = torch.empty(len(row_M), table.shape[1], dtype=table.dtype, pin_memory=self._stream is not None)
            torch.index_select(table, 0, row_M, out=buffer)
            rows[name] = buffer.to(self._device, non_blocking=True)
        return rows

    def _write_back(self, copies: Copies, event: "torch.cuda.Event | None") -> None:
        """Writes copies back once the device has reached the event."""
        with self._side_stream():
            if event is not None:
                event.wait()
            for name, rows in copies.tables.items():
                if self._stream is not None:
                    buffer = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
                    rows = buffer.copy_(rows, non_blocking=True)
                    self._stream.synchronize()
                self._home[name].index_copy_(0, copies.home_S, rows)

    def _event(self) -> "torch.cuda.Event | None":
        return torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None

    def _side_stream(self):
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
