"""Sample orders of a Loader: which sample stands at which position.

A position counts samples over all epochs and all ranks: epoch e holds positions e * N to (e + 1) * N - 1, N being the
size of the set. The state of training is one position, from which any number of ranks can continue.

    Keyed        shuffled by a keyed permutation: nothing is stored, every batch is full, batches cross epoch boundaries
    Balanced     classes as often as a power of their size says, each class's samples in turn
    Blocks       nearly as well shuffled, and read in contiguous pieces of disk or network
    Sharded      in source order; host k of S takes k, k + S, k + 2S, ...
    PerEpoch     torch's DistributedSampler: reshuffled each epoch, padded with repeated samples until all ranks have
                 equally many; an epoch's last batch may be smaller, by the same on every rank
    Epochs       another order, with epochs of a given size

B samples of this rank, W ranks.
"""

import math
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc.accessories import spare
from partial_fc.counter_rng import derive_key, permute

_AHEAD = 8192  # positions permuted at once
_ORDER, _BALANCE = 0, 3  # purposes of a key of `derive_key`; the loader uses 1 and 2


class Selection(NamedTuple):
    """One rank's part of a global batch. position_B, index_B: int64; end: the position after the global batch."""

    position_B: Tensor
    index_B: Tensor
    end: int
    ends_epoch: bool  # no update may continue past this batch


class Order(Protocol):
    """A pure function of (seed, position), the same on all ranks. Its methods are safe to call from several threads."""

    num_samples: int

    def select(self, start: int, batch_size: int, rank: int, world_size: int) -> Selection:
        """Returns the batch that begins at position `start`."""
        ...

    def updates_at(self, position: float, update_size: int) -> float:
        """Returns how many updates of update_size samples a run makes up to a position; fractional within an update."""
        ...

    def updates_to(self, start: int, stop: float, update_size: int) -> int:
        """Returns the number of updates between two positions."""
        ...


class Keyed:
    """The default order: position p is sample permute(p mod N) of epoch p // N, consecutive positions on one rank."""

    def __init__(self, num_samples: int, seed: int):
        self.num_samples = num_samples
        self._seed = seed
        self._lock = threading.Lock()
        # The next batches of the last caller: (start, batch size, rank, world size) -> indices.
        self._ahead: dict[tuple[int, int, int, int], Tensor] = {}

    def select(self, start: int, batch_size: int, rank: int, world_size: int) -> Selection:
        position_B = torch.arange(batch_size) + (start + rank * batch_size)
        end = start + batch_size * world_size
        with self._lock:
            index_B = self._ahead.pop((start, batch_size, rank, world_size), None)
            if index_B is None:
                # For a single batch the permutation's forty small operations cost as much as decoding it.
                starts = range(start, start + max(1, _AHEAD // batch_size) * (end - start), end - start)
                position_NB = (torch.tensor(starts) - start)[:, None] + position_B
                index_NB = self._permute(position_NB.flatten()).view_as(position_NB)
                self._ahead = {(s, batch_size, rank, world_size): row for s, row in zip(starts, index_NB, strict=True)}
                index_B = self._ahead.pop((start, batch_size, rank, world_size))
        return Selection(position_B, index_B, end, False)

    def _permute(self, position_N: Tensor) -> Tensor:
        return sample_order(position_N, self.num_samples, self._seed)

    def updates_at(self, position: float, update_size: int) -> float:
        return position / update_size

    def updates_to(self, start: int, stop: float, update_size: int) -> int:
        return max(0, math.ceil((stop - start) / update_size))


class Balanced(Keyed):
    """An epoch's N positions, shuffled, are shared by the classes in proportion to (samples of the class) ** power: 0:
    equally often, 0.5: by the square root, 1: every sample once. A class takes its samples in turn, over all epochs."""

    def __init__(self, label_N: NDArray[np.int64], seed: int, power: float):
        super().__init__(len(label_N), seed)
        self._by_class = torch.from_numpy(np.argsort(label_N, kind="stable"))
        self._count_C = torch.from_numpy(np.unique(label_N, return_counts=True)[1])
        self._first_C = self._count_C.cumsum(0) - self._count_C
        share_C = self._count_C.double() ** power
        self._share_C = share_C * (len(label_N) / share_C.sum())
        self._edge_C = torch.nn.functional.pad(self._share_C.cumsum(0), (1, 0))
        self._edge_C[-1] = len(label_N)

    def _permute(self, position_N: Tensor) -> Tensor:
        place_N, epoch_N = super()._permute(position_N), position_N // self.num_samples
        epochs, which = torch.unique(epoch_N, return_inverse=True)
        # Shares are no whole numbers: each epoch rounds their ends at an offset of its own.
        offsets = [derive_key(self._seed, _BALANCE, e) / 2**32 for e in epochs.tolist()]
        offset_N = torch.tensor(offsets, dtype=torch.float64)[which]
        # Class c has the places from floor(edge c + offset) to before floor(edge c + 1 + offset).
        class_N = torch.searchsorted(self._edge_C[1:], place_N + 1 - offset_N)
        begin_N = (self._edge_C[class_N] + offset_N).floor().long()
        turn_N = place_N - begin_N + (epoch_N * self._share_C[class_N]).long()
        return self._by_class[self._first_C[class_N] + turn_N % self._count_C[class_N]]


class Blocks(Keyed):
    """Shuffles blocks of consecutive samples, and then the samples of several blocks (a window), for spinning disks and
    network drives. Reads the next window while training on the current one.

    read_ahead(first, stop): makes the operating system read these samples, in their order; called in a thread.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        read_ahead: Callable[[int, int], None] | None = None,
        *,
        block: int = 1024,
        blocks_per_window: int = 32,
    ):
        super().__init__(num_samples, seed)
        self._read_ahead = read_ahead
        self._block = block
        self._num_blocks = num_samples // block  # the rest stays at the end of the last window
        self._window = block * blocks_per_window
        self._num_windows = max(1, self._num_blocks // blocks_per_window)
        self._fetched = -1  # the last requested window, counted over all epochs

    def select(self, start: int, batch_size: int, rank: int, world_size: int) -> Selection:
        window = self._window_of(start)
        if self._read_ahead and self._fetched != window + 1:
            windows = [window + 1] if self._fetched == window else [window, window + 1]
            self._fetched = window + 1
            thread = threading.Thread(target=self._fetch, args=(windows,), name="read-ahead", daemon=True)
            spare("reading ahead", thread.start)
        return super().select(start, batch_size, rank, world_size)

    def blocks_of(self, window: int) -> list[tuple[int, int]]:
        """Returns the sample ranges [first, stop) of a window, ascending."""
        epoch, begin, end = self._bounds(window)
        block = torch.arange(begin // self._block, min(end // self._block, self._num_blocks))
        ranges = [(b * self._block, (b + 1) * self._block) for b in self._place_of(block, epoch).sort().values.tolist()]
        return ranges + ([(self._num_blocks * self._block, end)] if end % self._block else [])

    def _fetch(self, windows: list[int]) -> None:
        assert self._read_ahead is not None
        for window in windows:
            for first, stop in self.blocks_of(window):
                self._read_ahead(first, stop)

    def _permute(self, position_N: Tensor) -> Tensor:
        index_N = torch.empty_like(position_N)
        window_N = torch.tensor([self._window_of(p) for p in position_N.tolist()])
        for window in window_N.unique().tolist():
            epoch, begin, end = self._bounds(window)
            inside = window_N == window
            place = position_N[inside] - (epoch * self.num_samples + begin)
            mixed = begin + permute(place, end - begin, derive_key(self._seed, _ORDER, epoch, window))
            block = mixed // self._block
            whole = block < self._num_blocks
            mixed[whole] = self._place_of(block[whole], epoch) * self._block + mixed[whole] % self._block
            index_N[inside] = mixed
        return index_N

    def _place_of(self, block: Tensor, epoch: int) -> Tensor:
        """Returns the source positions of an epoch's blocks."""
        return permute(block, self._num_blocks, derive_key(self._seed, _ORDER, epoch)) if len(block) else block

    def _window_of(self, position: int) -> int:
        epoch, place = divmod(position, self.num_samples)
        return epoch * self._num_windows + min(place // self._window, self._num_windows - 1)

    def _bounds(self, window: int) -> tuple[int, int, int]:
        """Returns (epoch, first and last block + 1 of the window in it)."""
        epoch, i = divmod(window, self._num_windows)
        return epoch, i * self._window, self.num_samples if i + 1 == self._num_windows else (i + 1) * self._window


class Sharded:
    """Samples in source order. Shard k of S, a host, takes k, k + S, k + 2S, ... and then k again; its batch is divided
    over its processes in consecutive pieces. Ranks are numbered host by host."""

    def __init__(self, num_samples: int, num_shards: int):
        if num_shards > num_samples:
            raise ValueError(f"{num_samples} samples for {num_shards} shards: expected at least one for each")
        self.num_samples = num_samples
        self._num_shards = num_shards

    def select(self, start: int, batch_size: int, rank: int, world_size: int) -> Selection:
        shard, local_rank = divmod(rank, world_size // self._num_shards)
        place_B = torch.arange(batch_size) + (start // self._num_shards + local_rank * batch_size)
        num_mine = math.ceil((self.num_samples - shard) / self._num_shards)
        position_B = place_B * self._num_shards + shard
        return Selection(
            position_B, place_B % num_mine * self._num_shards + shard, start + batch_size * world_size, False
        )

    updates_at, updates_to = Keyed.updates_at, Keyed.updates_to


class Epochs:
    """Another order with epochs of a given size, independent of the source."""

    def __init__(self, order: Order, size: int):
        self.num_samples = size
        self._order = order

    def select(self, start: int, batch_size: int, rank: int, world_size: int) -> Selection:
        selection = self._order.select(start, batch_size, rank, world_size)
        return selection._replace(ends_epoch=selection.end // self.num_samples > start // self.num_samples)

    updates_at, updates_to = Keyed.updates_at, Keyed.updates_to


class PerEpoch:
    """The order of torch.utils.data.DistributedSampler(shuffle=True, seed=seed), epoch by epoch."""

    def __init__(self, num_samples: int, seed: int):
        self.num_samples = num_samples
        self._seed = seed
        self._lock = threading.Lock()
        self._permutations: dict[int, Tensor] = {}  # of the last epochs

    def select(self, start: int, batch_size: int, rank: int, world_size: int) -> Selection:
        epoch, first = divmod(start, self.num_samples)
        left_of_rank = math.ceil((self.num_samples - first) / world_size)
        count = min(batch_size, left_of_rank)
        place_B = torch.arange(count) * world_size + (first + rank)
        index_B = self._permutation(epoch)[place_B % self.num_samples]
        end = min(first + count * world_size, self.num_samples)
        begin_of_epoch = epoch * self.num_samples
        return Selection(begin_of_epoch + place_B, index_B, begin_of_epoch + end, end == self.num_samples)

    def updates_at(self, position: float, update_size: int) -> float:
        epoch, place = divmod(position, self.num_samples)
        return epoch * math.ceil(self.num_samples / update_size) + place / update_size

    def updates_to(self, start: int, stop: float, update_size: int) -> int:
        count = 0
        while start < stop:
            end = min(stop, (start // self.num_samples + 1) * self.num_samples)
            count, start = (
                count + math.ceil((end - start) / update_size),
                int(end) if end == int(end) else math.ceil(end),
            )
        return count

    def _permutation(self, epoch: int) -> Tensor:
        with self._lock:
            if epoch not in self._permutations:
                generator = torch.Generator().manual_seed(self._seed + epoch)
                kept = dict(list(self._permutations.items())[-1:])
                self._permutations = {**kept, epoch: torch.randperm(self.num_samples, generator=generator)}
            return self._permutations[epoch]


def sample_order(position: Tensor, num_samples: int, seed: int) -> Tensor:
    """Maps positions to samples: int64 -> int64 in [0, num_samples).

    Every epoch, positions e * num_samples to (e + 1) * num_samples - 1, holds each sample once.
    """
    epoch, place = position // num_samples, position % num_samples
    epochs, which = torch.unique(epoch, return_inverse=True)
    keys = torch.tensor([derive_key(seed, _ORDER, e) for e in epochs.tolist()], dtype=torch.int64)
    return permute(place, num_samples, keys[which])
