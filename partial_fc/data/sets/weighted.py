"""The order of several sets of which some are drawn more often than others."""

import torch
from torch import Tensor

from partial_fc.counter_rng import derive_key
from partial_fc.data.order import Keyed, sample_order
from partial_fc.data.sets.joined import drawn

_SETS = 3  # purpose of a key; the order of positions uses 0, the loader 1 and 2


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
        place_N, epoch_N = super()._permute(position_N), position_N // self.num_samples
        index_N = torch.empty_like(place_N)
        first = first_draw = 0
        for number, (count, draws) in enumerate(self._sets):
            of_set = (place_N >= first_draw) & (place_N < first_draw + draws)
            draw = epoch_N[of_set] * draws + place_N[of_set] - first_draw
            if len(draw):
                index_N[of_set] = first + sample_order(draw, count, derive_key(self._seed, _SETS, number))
            first, first_draw = first + count, first_draw + draws
        return index_N
