"""Endless training batches: Loader(source, transform, order).

The source reads a sample, the transform makes an array of it, the order says which sample stands at which position
(order.py), and a Builder makes the batch (build.py), in threads or in a process beside this one (loader_process.py).
The whole state is one integer: the position, the number of samples that all ranks have consumed.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc.accessories import Foreground, threads
from partial_fc.data.build import Builder, Built, Transform
from partial_fc.data.loader_process import LoaderProcess, Pending
from partial_fc.data.order import Keyed, Order, Selection
from partial_fc.data.sample import Source, SourceGone, SourceRefused
from partial_fc.data.transform import channels_first


class Batch(NamedTuple):
    """One rank's part of a step.

    input_B: the transform's arrays; images and clips with channels moved behind the batch axis: (B, C, H, W), (B, C, T,
    H, W), channels-last in memory. label_B, key_B: int64; of a source with several labels (B, K), filled with
    labels.NONE. epoch: passes over the set after this batch, a fraction.
    position: samples consumed by all ranks after this batch; a new Loader resumes from it. num_global: samples of this
    batch on all ranks. ends_epoch: no update continues past this batch. position_B: int64, the samples' own positions,
    for random numbers inside a network; None: unknown. weight_B: float64, of each sample's loss; None: 1.
    """

    input_B: Tensor
    label_B: Tensor
    key_B: Tensor
    epoch: float
    position: int
    num_global: int
    ends_epoch: bool = False
    position_B: Tensor | None = None
    weight_B: Tensor | None = None


class Loader(AbstractContextManager["Loader"]):
    """Iterates over batches without end; close it, or use it as a context manager.

    transform: decodes, crops and augments. Its rng depends on (seed, position) only, so ranks and threads do not change
    a sample. order: Keyed by default. batch_size: of this rank. position: where to start (Batch.position). Logs and
    replaces a damaged record; more than `max_bad_records` different ones on this rank raise ValueError. num_workers
    threads build a whole batch each (0: the calling thread does); up to `prefetch` finished batches wait. labels_drawn:
    how many of a sample's labels a batch has, drawn by (seed, position); 0: all. For several sets (Joined) it may be
    one number, 1 or more, for each set. weights: of each sample of the source, by its index; None: batches have none.

    mode: "process": the threads run in a process of their own, where the source is opened again; transform and source
    travel by pickle. The same batches, but a batch's memory is used again: it is valid until `keep` more batches have
    been returned. pin_memory: batches lie in page-locked memory, from which GPUs copy in the background.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        order: Order | None = None,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        position: int = 0,
        num_workers: int = 2,
        prefetch: int = 2,
        max_bad_records: int = 100,
        pin_memory: bool = False,
        labels_drawn: int | Sequence[int] = 0,
        weights: NDArray | None = None,
        mode: Literal["threads", "process"] = "threads",
        keep: int = 1,
    ) -> None:
        self.source = source
        self.order = order or Keyed(len(source), seed)
        self.batch_size = batch_size
        # Position of the next batch to return.
        self.position = position
        self.builder = Builder(source, transform, rank, world_size, seed, max_bad_records, labels_drawn, weights)
        self._in_flight = num_workers + prefetch if num_workers else 0
        self._workers: LoaderProcess | _Threads
        if mode == "process" and not getattr(source, "alike", False):  # nothing is decoded for those
            num_slots = max(1, self._in_flight) + keep
            self._workers = LoaderProcess(self.builder, batch_size, num_slots, max(1, num_workers), pin_memory)
        else:
            self._workers = _Threads(self.builder, num_workers, pin_memory)
        self._pending: deque[tuple[Selection, Pending | Future[Built]]] = deque()
        self._next_position = position  # position of the next batch to start
        self._reserve: list[Batch] = []  # the update after the last returned, of a remote source
        self.gone: SourceGone | None = None  # why there is no further update

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self.builder.stop.is_set():
            raise RuntimeError("the loader is closed")
        while len(self._pending) < max(1, self._in_flight):
            selection = self.order.select(
                self._next_position, self.batch_size, self.builder.rank, self.builder.world_size
            )
            self._next_position = selection.end
            self._pending.append((selection, self._workers.submit(selection)))
        try:
            selection, pending = self._pending.popleft()
            built = pending.result()
        except BaseException:
            self.close()
            raise
        self.position = selection.end
        return Batch(
            channels_first(torch.from_numpy(built.data_B)),
            torch.from_numpy(built.label_B),
            torch.from_numpy(built.key_B),
            selection.end / self.order.num_samples,
            selection.end,
            len(built.key_B) * self.builder.world_size,
            selection.ends_epoch,
            selection.position_B,
            None if built.weight_B is None else torch.from_numpy(built.weight_B),
        )

    def next_update(self, accumulate: int) -> list[Batch]:
        """Returns the micro-batches of one update: `accumulate`, or fewer at the end of an epoch (ends_epoch).

        A remote source's come once those of the next update are there, too: if their server is unreachable or refuses
        them for a while, `gone` says so, and all ranks can end together after this update. What it refuses for the very
        first update is an error at once."""
        if not getattr(self.source, "remote", False):
            return self._update(accumulate)
        if self.gone:
            raise self.gone
        batches, self._reserve = self._reserve or self._update(accumulate), []
        self.builder.has_started = True
        try:
            self._reserve = self._update(accumulate)
        except (SourceGone, SourceRefused) as error:
            self.gone = SourceGone(str(error))
        return batches

    def _update(self, accumulate: int) -> list[Batch]:
        batches: list[Batch] = []
        while len(batches) < accumulate and not (batches and batches[-1].ends_epoch):
            batches.append(next(self))
        return batches

    def seek(self, position: int) -> None:
        """Sets the position of the next batch. Discards batches in progress."""
        for _, pending in self._pending:
            pending.cancel()
        self._pending.clear()
        self._reserve = []
        self.position = self._next_position = position

    def close(self) -> None:
        """Stops the workers and waits for them: at most for one image each."""
        self.builder.stop.set()
        self._workers.close()
        self._pending.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Threads:
    """Builds batches in this process, as LoaderProcess does in another."""

    def __init__(self, builder: Builder, num_threads: int, pin_memory: bool) -> None:
        self._builder = builder
        self._pool = threads(max(1, num_threads), "loader") if num_threads else Foreground()
        builder.room = partial(_room, pin_memory)

    def submit(self, selection: Selection) -> "Future[Built]":
        return self._pool.submit(self._builder.build, selection.position_B.numpy(), selection.index_B.numpy())

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _room(pin_memory: bool, num: int, shape: tuple[int, ...], dtype: np.dtype) -> NDArray:
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty((num, *shape), dtype=kind, pin_memory=pin_memory).numpy()
