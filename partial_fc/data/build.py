"""What makes a batch: reads samples, decodes and augments them, replaces damaged ones. It has no order and no position,
so it works as well in another process (loader_process.py)."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc.counter_rng import derive_key
from partial_fc.data.labels import NONE, in_array
from partial_fc.data.sample import BadRecord, LabelOutOfRange, Sample, Source, SourceGone, SourceRefused
from partial_fc.data.sets import ranges
from partial_fc.data.transform import as_stored
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


class Built(NamedTuple):
    """The samples of a batch: arrays as the transform makes them, (B, ...); labels and keys, int64 (B,), labels of a
    source with several (B, K); weights, float64 (B,), or None."""

    data_B: NDArray
    label_B: NDArray[np.int64]
    key_B: NDArray[np.int64]
    weight_B: NDArray[np.float64] | None


@dataclass(eq=False)
class Builder:
    """Builds batches, in several threads at once; see Loader for the options. Travels to another process, where its
    source is opened again.

    room: (samples, shape, dtype) -> where a batch is built. stop: set to end all threads after the image at hand.
    """

    source: Source
    transform: Transform
    rank: int
    world_size: int
    seed: int
    max_bad_records: int
    labels_drawn: int | Sequence[int]
    weights: NDArray | None

    def __post_init__(self) -> None:
        self.num_labels = getattr(self.source, "num_labels", 1)
        self.room: Callable[[int, tuple[int, ...], np.dtype], NDArray]
        self.stop = threading.Event()
        self.has_started = False  # an update was returned
        self.bad: dict[int, str] = {}  # index -> error
        self._staged = self.transform if isinstance(self.transform, Staged) else None
        self._layout: tuple[tuple[int, ...], np.dtype] | None = None  # shape and dtype of the transform's first array
        self._alike_B = np.empty(0)  # a batch of a source whose samples have the same data
        self._augment_key = derive_key(self.seed, _AUGMENT)
        self._lock = threading.Lock()
        self._random = _Random()

    def __reduce__(self) -> tuple[Any, ...]:
        return Builder, tuple(getattr(self, field.name) for field in fields(self))

    def build(self, position_B: NDArray[np.int64], index_B: NDArray[np.int64]) -> Built:
        """Makes the batch of these samples. position_B: of their random numbers."""
        self.source.will_need(index_B.tolist())
        at_once = self.source.read_batch(index_B) if self.transform is as_stored else None
        if getattr(self.source, "alike", False):
            data_B, label_B, key_B = self._alike(index_B.tolist())
        elif at_once:
            data_B = self.room(len(index_B), at_once[0].shape[1:], at_once[0].dtype)
            data_B[...] = at_once[0]
            label_B, key_B = at_once[1:]
        else:
            data_B, label_B, key_B, index_B = self._each(position_B.tolist(), index_B.tolist())
        if self.labels_drawn:
            label_B = self._drawn(torch.from_numpy(label_B), position_B, index_B).numpy()
        weight_B = None if self.weights is None else self.weights[index_B].astype(np.float64)
        return Built(data_B, label_B, key_B, weight_B)

    def _alike(self, index_B: list[int]) -> tuple[NDArray, ...]:
        """Returns (arrays, labels, keys): the first sample's array for all, made once."""
        samples = [self.source.read(index) for index in index_B]
        if len(self._alike_B) < len(index_B):
            array = self.transform(samples[0], self._random.at(0, self._augment_key))
            alike_B = self.room(len(index_B), array.shape, array.dtype)
            alike_B[...] = array
            self._alike_B = alike_B
        labels = [in_array(sample, self.num_labels) for sample in samples]
        return self._alike_B[: len(index_B)], np.array(labels, np.int64), np.array(index_B, np.int64)

    def _drawn(self, label_BK: Tensor, position_B: NDArray[np.int64], index_B: NDArray[np.int64]) -> Tensor:
        number_S = torch.tensor(self.labels_drawn).view(-1)
        most = int(number_S.max())
        place_BN = draw_labels(label_BK, most, torch.from_numpy(position_B), 0, self.seed, ignore_index=NONE)
        label_BN = label_BK.gather(1, place_BN)
        if len(number_S) == 1:
            return label_BN
        number_B = number_S[torch.from_numpy(self.source.set_of(index_B))]
        return label_BN.masked_fill_(torch.arange(most) >= number_B[:, None], NONE)

    def _each(self, position_B: list[int], index_B: list[int]) -> tuple[NDArray, ...]:
        """Returns (arrays, labels, keys, indices)."""
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
        return self.room(num, shape, dtype)

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
        if self.stop.is_set():
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
                if not self.has_started:
                    raise
                if wait_s is None or self.stop.wait(wait_s):
                    raise SourceGone(f"{error}; tried {len(ranges.WAITS_S) + 1} times") from None
                _log.warning("%s; trying again after %g s", error, wait_s)
        raise AssertionError

    def _note_bad(self, index: int, message: str) -> None:
        with self._lock:
            known = index in self.bad
            self.bad.setdefault(index, message)
            num = len(self.bad)
            # Known ones count too: beyond the limit no thread may continue to search for a good one.
            if num > self.max_bad_records or num == len(self.source):
                first = "\n  ".join(list(self.bad.values())[:10])
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
