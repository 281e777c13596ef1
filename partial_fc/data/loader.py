"""Endless training batches from a Source.

Samples are numbered by position p = 0, 1, 2, ... over all epochs and all ranks. Position p is sample
permute(p mod N) of epoch p // N, N being the size of the set, and the permutation a keyed function: nothing
is stored, nothing dropped, every batch is full, and every rank has the same number of them. The global batch
of a step is the next G positions, each rank taking its B in turn. So the order does not depend on the number
of ranks, and the whole state is one integer: the number of samples consumed.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc.counter_rng import derive_key, permute
from partial_fc.data.decode import decode, fit
from partial_fc.data.sample import BadRecord, Source, naming

Augment = Callable[[NDArray[np.uint8], np.random.Generator], NDArray[np.uint8]]

_ORDER, _AUGMENT, _REPLACE = range(3)  # what a key is for
_log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """One rank's part of a step.

    image_B3HW: uint8 RGB, channels-last in memory (as decoded; the layout GPUs like best).
    label_B, key_B: int64. epoch: passes over the set after this batch, a fraction. position: samples consumed
    by all ranks after this batch; give it to a new Loader to continue here.
    """

    image_B3HW: Tensor
    label_B: Tensor
    key_B: Tensor
    epoch: float
    position: int


class Loader:
    """Iterates over batches without end; close it, or use it as a context manager.

    batch_size: of this rank. position: where to start, as Batch.position said. augment(image_HWC, rng) ->
    image_HWC: rng depends on (seed, position) only, so neither ranks nor threads change what a sample looks
    like. A damaged record is named in the log and replaced by another one; more than `max_bad_records`
    different ones on this rank raise ValueError. num_workers threads decode, each a whole batch at a time; up
    to `prefetch` batches wait beyond those in work.
    """

    def __init__(
        self,
        source: Source,
        *,
        image_size: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        position: int = 0,
        augment: Augment | None = None,
        num_workers: int = 2,
        prefetch: int = 2,
        max_bad_records: int = 100,
        pin_memory: bool = False,
    ) -> None:
        for name, value in (
            ("batch_size", batch_size),
            ("num_workers", num_workers),
            ("world_size", world_size),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size}: expected 0 <= rank < world_size")
        self.source = source
        self.image_size = image_size
        self.batch_size = batch_size
        self.global_batch_size = batch_size * world_size
        self.rank = rank
        self.seed = seed
        self.position = position  # of the next batch to be given out
        self.augment = augment
        self._augment_key = derive_key(seed, _AUGMENT)
        self.max_bad_records = max_bad_records
        self.pin_memory = pin_memory
        self._bad: dict[int, str] = {}  # index -> what was wrong
        self._bad_lock = threading.Lock()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="loader")
        self._in_flight = num_workers + prefetch
        self._pending: deque[Future[Batch]] = deque()
        self._next_position = position  # of the next batch to be started

    @property
    def num_bad_records(self) -> int:
        """How many different records of this rank could not be used so far."""
        return len(self._bad)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise RuntimeError("the loader is closed")
        while len(self._pending) < self._in_flight:
            self._pending.append(self._pool.submit(self._build, self._next_position))
            self._next_position += self.global_batch_size
        try:
            batch = self._pending.popleft().result()
        except BaseException:
            self.close()
            raise
        self.position = batch.position
        return batch

    def go_to(self, position: int) -> None:
        """The next batch begins at this position. Batches that were under way are given up."""
        for future in self._pending:
            future.cancel()
        self._pending.clear()
        self.position = self._next_position = position

    def close(self) -> None:
        """Stops the threads and waits for them: at most the time of one image each."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self, start: int) -> Batch:
        size = self.image_size
        position_B = torch.arange(self.batch_size) + (start + self.rank * self.batch_size)
        index_B = sample_order(position_B, len(self.source), self.seed).tolist()
        self.source.will_need(index_B)
        image_BHW3 = torch.empty((self.batch_size, size, size, 3), dtype=torch.uint8, pin_memory=self.pin_memory)
        pixels = image_BHW3.numpy()
        label_B = torch.empty(self.batch_size, dtype=torch.int64)
        key_B = torch.empty(self.batch_size, dtype=torch.int64)
        for i, (position, index) in enumerate(zip(position_B.tolist(), index_B, strict=True)):
            if self._stop.is_set():
                raise RuntimeError("the loader is closed")
            image, label_B[i], key_B[i] = self._load_or_replace(position, index)
            np.copyto(pixels[i], image, casting="no")
        end = start + self.global_batch_size
        return Batch(image_BHW3.permute(0, 3, 1, 2), label_B, key_B, end / len(self.source), end)

    def _load_or_replace(self, position: int, index: int) -> tuple[NDArray[np.uint8], int, int]:
        """(pixels, label, key). What replaces a damaged record depends on seed and position only."""
        attempt = 0
        while True:
            try:
                return self._load(position, index)
            except BadRecord as error:
                self._note_bad(index, str(error))
            attempt += 1
            index = derive_key(self.seed, _REPLACE, position, attempt) % len(self.source)

    def _load(self, position: int, index: int) -> tuple[NDArray[np.uint8], int, int]:
        sample = self.source.read(index)
        with naming(self.source, index):
            image = decode(sample.image) if isinstance(sample.image, bytes) else sample.image
            image = fit(image, self.image_size)
        if self.augment is not None:
            image = self.augment(image, self._generator(position))
        return image, sample.label, sample.key

    def _generator(self, position: int) -> np.random.Generator:
        # Philox is counter-based: any two of its keys give unrelated streams, with no state to mix first.
        return np.random.Generator(np.random.Philox(key=np.array([position, self._augment_key], np.uint64)))

    def _note_bad(self, index: int, message: str) -> None:
        with self._bad_lock:
            known = index in self._bad
            self._bad.setdefault(index, message)
            count = len(self._bad)
            # Known ones count here too: once there are too many, no thread may go on looking for a good one.
            if count > self.max_bad_records or count == len(self.source):
                first = "\n  ".join(list(self._bad.values())[:10])
                raise ValueError(
                    f"{count} bad records on rank {self.rank}, at most {self.max_bad_records} are tolerated "
                    f"(--max-bad-records). The first ones:\n  {first}"
                )
            if not known:
                _log.warning("bad record %d of at most %d, replaced: %s", count, self.max_bad_records, message)


def sample_order(position: Tensor, num_samples: int, seed: int) -> Tensor:
    """Which sample stands at each position: int64 -> int64 in [0, num_samples).

    Every epoch, positions e * num_samples to (e + 1) * num_samples - 1, holds each sample once.
    """
    epoch, place = position // num_samples, position % num_samples
    epochs, which = torch.unique(epoch, return_inverse=True)
    keys = torch.tensor([derive_key(seed, _ORDER, e) for e in epochs.tolist()], dtype=torch.int64)
    return permute(place, num_samples, keys[which])
