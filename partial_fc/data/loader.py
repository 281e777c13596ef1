"""Endless training batches: Loader(source, transform, order).

The source reads a sample, the transform makes an array of it, the order says which sample stands at which position
(order.py). The whole state is one integer: the position, the number of samples that all ranks have consumed.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc.accessories import threads
from partial_fc.counter_rng import derive_key
from partial_fc.data.labels import NONE, in_array
from partial_fc.data.order import Keyed, Order, Selection
from partial_fc.data.sample import BadRecord, LabelOutOfRange, Sample, Source, SourceGone, SourceRefused
from partial_fc.data.sets import ranges
from partial_fc.data.transform import as_stored, channels_first
from partial_fc.head.selection.labels import draw_labels


class Transform(Protocol):
    def __call__(self, sample: Sample, rng: np.random.Generator, out: NDArray | None = None, /) -> NDArray:
        """Makes an array of one fixed shape and dtype; images and clips channels last. Raises BadRecord. out: the
        destination, once the first sample has set shape and dtype; returned if it was used. rng: for this call."""
        ...


@runtime_checkable
class Staged(Protocol):
    """A transform in two parts, each of which the loader runs for many samples in turn: decoding drives all other code
    out of the processor's first caches, and what runs between two images takes up to three times as long."""

    augment: Callable[[NDArray, np.random.Generator], NDArray] | None

    def place(self, samples: Sequence[Sample | None], outs: Sequence[NDArray]) -> list[bool]:
        """Writes samples (None: a damaged one) to their places, and tells which. Those need `augment` only; the others
        take the ordinary call."""
        ...


_AUGMENT, _REPLACE = 1, 2  # purposes of a key; 0 is the order's
_TOGETHER_BYTES = 2**20  # of samples that are read before the first is decoded
_log = logging.getLogger(__name__)


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


class Loader:
    """Iterates over batches without end; close it, or use it as a context manager.

    transform: decodes, crops and augments. Its rng depends on (seed, position) only, so ranks and threads do not change
    a sample. order: Keyed by default. batch_size: of this rank. position: where to start (Batch.position). Logs and
    replaces a damaged record; more than `max_bad_records` different ones on this rank raise ValueError. num_workers
    threads build a whole batch each (0: the calling thread does); up to `prefetch` finished batches wait. labels_drawn:
    how many of a sample's labels a batch has, drawn by (seed, position); 0: all. For several sets (Joined) it may be
    one number, 1 or more, for each set. weights: of each sample of the source, by its index; None: batches have none.
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
    ) -> None:
        self.source = source
        self.transform = transform
        self._staged = transform if isinstance(transform, Staged) else None
        self.order = order or Keyed(len(source), seed)
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        # Position of the next batch to return.
        self.position = position
        self._layout: tuple[tuple[int, ...], np.dtype] | None = None  # shape and dtype of the transform's first array
        self._augment_key = derive_key(seed, _AUGMENT)
        self.max_bad_records = max_bad_records
        self.pin_memory = pin_memory
        self.num_labels = getattr(source, "num_labels", 1)
        self.labels_drawn = labels_drawn
        self._weights = weights
        self._bad: dict[int, str] = {}  # index -> error
        self._bad_lock = threading.Lock()
        self._stop = threading.Event()
        self._random = _Random()
        self._pool = threads(max(1, num_workers), "loader")
        self._in_flight = num_workers + prefetch if num_workers else 0
        self._pending: deque[Future[Batch]] = deque()
        self._next_position = position  # position of the next batch to start
        self._reserve: list[Batch] = []  # the update after the last returned, of a remote source
        self.gone: SourceGone | None = None  # why there is no further update
        self._has_started = False  # an update was returned

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise RuntimeError("the loader is closed")
        while len(self._pending) < self._in_flight:
            self._pending.append(self._pool.submit(self._build, self._select_next()))
        try:
            batch = self._pending.popleft().result() if self._pending else self._build(self._select_next())
        except BaseException:
            self.close()
            raise
        self.position = batch.position
        return batch

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
        self._has_started = True
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

    def _select_next(self) -> Selection:
        selection = self.order.select(self._next_position, self.batch_size, self.rank, self.world_size)
        self._next_position = selection.end
        return selection

    def seek(self, position: int) -> None:
        """Sets the position of the next batch. Discards batches in progress."""
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        self._reserve = []
        self.position = self._next_position = position

    def close(self) -> None:
        """Stops the threads and waits for them: at most for one image each."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self, selection: Selection) -> Batch:
        index_B = selection.index_B
        self.source.will_need(index_B.tolist())
        at_once = self.source.read_batch(index_B.numpy()) if self.transform is as_stored else None
        data_B, labels, key_B, used_B = (*at_once, index_B.numpy()) if at_once else self._each(selection)
        label_B = torch.from_numpy(labels)
        if self.labels_drawn:
            label_B = self._drawn(label_B, selection.position_B, used_B)
        weight_B = None if self._weights is None else torch.from_numpy(self._weights[used_B].astype(np.float64))
        return Batch(
            channels_first(torch.from_numpy(data_B)),
            label_B,
            torch.from_numpy(key_B),
            selection.end / self.order.num_samples,
            selection.end,
            len(index_B) * self.world_size,
            selection.ends_epoch,
            selection.position_B,
            weight_B,
        )

    def _drawn(self, label_BK: Tensor, position_B: Tensor, index_B: NDArray[np.int64]) -> Tensor:
        number_S = torch.tensor(self.labels_drawn).view(-1)
        most = int(number_S.max())
        place_BN = draw_labels(label_BK, most, position_B, 0, self.seed, ignore_index=NONE)
        label_BN = label_BK.gather(1, place_BN)
        if len(number_S) == 1:
            return label_BN
        number_B = number_S[torch.from_numpy(self.source.set_of(index_B))]
        return label_BN.masked_fill_(torch.arange(most) >= number_B[:, None], NONE)

    def _each(self, selection: Selection) -> tuple[NDArray, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns (arrays, labels, keys, indices)."""
        position_B, index_B = selection.position_B.tolist(), selection.index_B.tolist()
        data_B = self._empty(len(index_B)) if self._layout else None
        labels: list[Any] = []
        keys: list[int] = []
        while (first := len(keys)) < len(index_B):
            # Without a layout the first sample goes alone.
            samples = self._read_together(index_B[first:] if data_B is not None else index_B[:1])
            outs = [] if data_B is None else list(data_B[first : first + len(samples)])
            arrays = self._place(position_B[first:], samples, outs)
            for at, (sample, out, array) in enumerate(zip(samples, outs or [None], arrays, strict=True), first):
                if array is None:
                    array, sample, index_B[at] = self._load_or_replace(position_B[at], index_B[at], sample, out)
                assert sample is not None
                labels.append(in_array(sample, self.num_labels))
                keys.append(sample.key)
                if array is out:
                    continue
                if data_B is None:
                    self._layout = self._layout or (array.shape, array.dtype)
                    data_B = self._empty(len(index_B))
                self._check_layout(array, index_B[at])
                data_B[at] = array
        assert data_B is not None
        return data_B, np.array(labels, np.int64), np.array(keys, np.int64), np.array(index_B, np.int64)

    def _place(
        self, positions: list[int], samples: list[Sample | None], outs: list[NDArray]
    ) -> Sequence[NDArray | None]:
        """Returns the arrays that a staged transform has placed and augmented, None for the others."""
        if self._staged is None or not outs:
            return [None] * len(samples)
        augment, at, key = self._staged.augment, self._random.at, self._augment_key
        return [
            (augment(out, at(position, key)) if augment else out) if done else None
            for done, position, out in zip(self._staged.place(samples, outs), positions, outs, strict=False)
        ]

    def _empty(self, num: int) -> NDArray:
        """Returns an empty batch of arrays like the very first one."""
        assert self._layout is not None
        shape, dtype = self._layout
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        return torch.empty((num, *shape), dtype=kind, pin_memory=self.pin_memory).numpy()

    def _check_layout(self, array: NDArray, index: int) -> None:
        assert self._layout is not None
        if (array.shape, array.dtype) != self._layout:
            shape, dtype = self._layout
            raise ValueError(
                f"{self.source.where(index)}: the transform gives {array.dtype} {array.shape}, {dtype} {shape} of the "
                "first sample; expected one shape and dtype"
            )

    def _read_together(self, indices: list[int]) -> list[Sample | None]:
        """Reads the first of these samples, one or more; None: a damaged one, to be reported when its turn comes."""
        samples: list[Sample | None] = []
        num_bytes = 0
        for index in indices:
            self._check_open()
            try:
                sample = self._read(index)
            except BadRecord:
                samples.append(None)
                continue
            samples.append(sample)
            data = sample.data
            num_bytes += len(data) if isinstance(data, bytes) else getattr(data, "nbytes", _TOGETHER_BYTES)
            if num_bytes >= _TOGETHER_BYTES:
                break
        return samples

    def _load_or_replace(
        self, position: int, index: int, sample: Sample | None, out: NDArray | None
    ) -> tuple[NDArray, Sample, int]:
        """Returns (array, sample, index) of a sample, read already or not. A damaged record is replaced by (seed,
        position) only."""
        for attempt in count(1):
            self._check_open()
            try:
                sample = sample or self._read(index)
                return self.transform(sample, self._random.at(position, self._augment_key), out), sample, index
            except BadRecord as error:
                self._note_bad(index, f"{self.source.where(index)}: {error}" if sample else str(error))
            sample, index = None, derive_key(self.seed, _REPLACE, position, attempt) % len(self.source)
        raise AssertionError

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise RuntimeError("the loader is closed")

    def _read(self, index: int) -> Sample:
        for wait_s in (*ranges.WAITS_S, None):
            try:
                return self.source.read(index)
            except LabelOutOfRange as error:
                if self.world_size == 1:
                    raise
                raise LabelOutOfRange(f"rank {self.rank}: {error}", error.label) from None
            except SourceRefused as error:
                if not self._has_started:
                    raise
                if wait_s is None or self._stop.wait(wait_s):
                    raise SourceGone(f"{error}; tried {len(ranges.WAITS_S) + 1} times") from None
                _log.warning("%s; trying again after %g s", error, wait_s)
        raise AssertionError

    def _note_bad(self, index: int, message: str) -> None:
        with self._bad_lock:
            known = index in self._bad
            self._bad.setdefault(index, message)
            num = len(self._bad)
            # Known ones count too: beyond the limit no thread may continue to search for a good one.
            if num > self.max_bad_records or num == len(self.source):
                first = "\n  ".join(list(self._bad.values())[:10])
                raise ValueError(
                    f"{num} bad records on rank {self.rank}, at most {self.max_bad_records} are tolerated "
                    f"(--max-bad-records). The first ones:\n  {first}"
                )
            if not known:
                _log.warning("bad record %d of at most %d, replaced: %s", num, self.max_bad_records, message)


class _Random(threading.local):
    """A generator per thread, reseeded for every sample: ten times as fast as a new one."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._counters: dict[str, Any] = {"counter": (0, 0, 0, 0)}
        empty = {"buffer": (0, 0, 0, 0), "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
        self._state: Any = {"bit_generator": "Philox", "state": self._counters, **empty}

    def at(self, position: int, key: int) -> np.random.Generator:
        """Returns the equivalent of `Generator(Philox(key=[position, key]))`, valid until the next call. Philox is
        counter-based: any two keys give unrelated streams."""
        self._counters["key"] = (position, key)
        self._bits.state = self._state
        return self._generator
