"""Orders of several sets: some drawn more often than others, or a number of each in every batch."""

import math

import torch
from torch import Tensor

from partial_fc.counter_rng import derive_key
from partial_fc.data.order import Keyed, sample_order
from partial_fc.data.sets.joined import drawn

_SETS = 3  # purpose of a key; the order of positions uses 0, the loader 1 and 2


def _of_sets(turn_N: Tensor, place_N: Tensor, sets: list[tuple[int, int]], seed: int) -> Tensor:
    """Returns the samples at places of turns. sets: (samples, places in every turn) of each, in order. Each set draws
    its samples in its own keyed order, counted over all turns."""
    index_N = torch.empty_like(place_N)
    first = first_place = 0
    for number, (count, places) in enumerate(sets):
        of_set = (place_N >= first_place) & (place_N < first_place + places)
        draw_N = turn_N[of_set] * places + place_N[of_set] - first_place
        if len(draw_N):
            draw_N = sample_order(draw_N, count, derive_key(seed, _SETS, number))
        index_N[of_set] = first + draw_N
        first, first_place = first + count, first_place + places
    return index_N


class Weighted(Keyed):
    """A keyed order whose epoch draws round(weight * samples) of each set, mixed. Draw t of a set, counted over all
    epochs, takes the sample at position t of the set's own keyed order: with weight 0.5 two epochs see each sample
    once, with weight 2 one epoch sees each twice.

    sets: (name, samples, weight) of each.
    """

    def __init__(self, sets: list[tuple[str, int, float]], seed: int):
        self._sets = [(count, drawn(count, weight)) for _, count, weight in sets]
        super().__init__(sum(draws for _, draws in self._sets), seed)

    def _permute(self, position_N: Tensor) -> Tensor:
        return _of_sets(position_N // self.num_samples, super()._permute(position_N), self._sets, self._seed)


class Shares(Keyed):
    """So many samples of each set in every batch of a rank; each set in its own keyed order. Only the ratio of the
    numbers decides: 6 and 3 are two of one set, one of the other, and so on, for any number of ranks. An epoch ends
    when the set with the most samples for its share has been read once.

    sets: (name, samples, weight) of each; the weights are not used. shares: samples of each in a batch, 1 or more.
    """

    def __init__(self, sets: list[tuple[str, int, float]], shares: list[int], seed: int):
        common = math.gcd(*shares)
        self._sets = [(count, share // common) for (_, count, _), share in zip(sets, shares, strict=True)]
        self._turn = sum(share for _, share in self._sets)
        super().__init__(max(-(-count // share) for count, share in self._sets) * self._turn, seed)

    def _permute(self, position_N: Tensor) -> Tensor:
        return _of_sets(position_N // self._turn, position_N % self._turn, self._sets, self._seed)
