"""Which sample stands at which position: the order in which a Loader reads its source.

A position counts samples over all epochs and all ranks: epoch e holds positions e * N to (e + 1) * N - 1, N being the
size of the set. Where training stands is one position, and from there on any number of ranks goes on.

    Keyed        shuffled by a keyed permutation: nothing is stored, every batch is full, batches run over epochs' ends
    Sequential   as the source has them; rank r of W takes r, r + W, r + 2W, ... (Caffe2's sharded readers)
    PerEpoch     torch's DistributedSampler: shuffled anew in each epoch, filled up with repeated samples until all
                 ranks have equally many; an epoch's last batch may be smaller, by as much on every rank

B samples of this rank, W ranks.
"""

import math
import threading
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from partial_fc.counter_rng import derive_key, permute

_AHEAD = 8192  # positions that are permuted at once
_ORDER = 0  # what a key of `derive_key` is for; the loader uses 1 and 2


class Selection(NamedTuple):
    """One rank's part of a global batch. position_B, index_B: int64; end: the position after the global batch."""

    position_B: Tensor
    index_B: Tensor
    end: int
    ends_epoch: bool  # whether an update must not go on beyond this batch


class Order(Protocol):
    """A pure function of (seed, position), the same on all ranks. Its methods may be called from several threads."""

    num_samples: int

    def select(self, start: int, batch_size: int, rank: int, world_size: int) -> Selection:
        """The batch that begins at position `start`."""
        ...

    def updates_at(self, position: float, update_size: int) -> float:
        """How many updates of update_size samples a run from the start has made when it reaches a position; a fraction
        within an update."""
        ...

    def updates_to(self, start: int, stop: float, update_size: int) -> int:
        """How many updates lie between two positions."""
        ...


class Keyed:
    """The default: position p is sample permute(p mod N) of epoch p // N, consecutive positions on one rank."""

    def __init__(self, num_samples: int, seed: int):
        self.num_samples = num_samples
        self._seed = seed
        self._lock = threading.Lock()
        # The next batches of whoever asked last: (start, batch size, rank, world size) -> indices.
        self._ahead: dict[tuple[int, int, int, int], Tensor] = {}

    def select(self, start: int, batch_size: int, rank: int, world_size: int) -> Selection:
        position_B = torch.arange(batch_size) + (start + rank * batch_size)
        end = start + batch_size * world_size
        with self._lock:
            index_B = self._ahead.pop((start, batch_size, rank, world_size), None)
            if index_B is None:
                # For a batch alone the permutation's forty small operations cost as much as decoding it.
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


class Sequential:
    """Samples as the source has them, dealt out in turn; after the last one the first."""

    def __init__(self, num_samples: int):
        self.num_samples = num_samples

    def select(self, start: int, batch_size: int, rank: int, world_size: int) -> Selection:
        position_B = torch.arange(batch_size) * world_size + (start + rank)
        return Selection(position_B, position_B % self.num_samples, start + batch_size * world_size, False)

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
    """Which sample stands at each position: int64 -> int64 in [0, num_samples).

    Every epoch, positions e * num_samples to (e + 1) * num_samples - 1, holds each sample once.
    """
    epoch, place = position // num_samples, position % num_samples
    epochs, which = torch.unique(epoch, return_inverse=True)
    keys = torch.tensor([derive_key(seed, _ORDER, e) for e in epochs.tolist()], dtype=torch.int64)
    return permute(place, num_samples, keys[which])
