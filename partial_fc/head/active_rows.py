"""Which centres take part in a step on this rank: all, or the batch's own classes and sampled negatives."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from partial_fc.head.rows import RowTable
from partial_fc.head.sampling import Sampling
from partial_fc.head.shard import Shard

if TYPE_CHECKING:
    from partial_fc.head.hard_negatives import HardNegatives


@dataclass(frozen=True)
class TakingPart:
    """The centres of a step, fetched."""

    rows: Tensor | None  # local rows, ascending; None: all
    bias_S: Tensor | None  # -log of the probability that they take part; None: 0
    table: Tensor  # where the centres were fetched to
    row_S: Tensor | None  # their places in `table`; None: all of it


class Selection:
    """Says for each step which centres take part. The drawn ones are known a step ahead."""

    def __init__(
        self,
        sampling: Sampling,
        shard: Shard,
        sub_centres: int,
        store: RowTable,
        hard_negatives: "HardNegatives | None",
        correction: bool,
    ):
        self._sampling = sampling
        self._shard = shard
        self._sub_centres = sub_centres
        self._store = store
        self._hard_negatives = hard_negatives
        self._correction = correction
        self._drawn: tuple[int, Tensor] | None = None  # (step, its negatives), where they were wanted early

    def fetch(self, label_G: Tensor, step: int) -> TakingPart:
        """For a batch with these labels."""
        rows, bias_S = self.rows(label_G, step)
        table, row_S = self._store.fetch(rows, step)
        return TakingPart(rows, bias_S, table, row_S)

    def rows(self, label_G: Tensor, step: int) -> tuple[Tensor | None, Tensor | None]:
        """(local rows that take part, ascending; -log of the probability that they do). None: all; 0."""
        if self._sampling.rate == 1.0:
            return None, None
        certain = label_G[(label_G >= self._shard.start) & (label_G < self._shard.stop)]
        if self._hard_negatives is not None:
            certain = torch.cat((certain, self._hard_negatives.classes(label_G, self._shard)))
        certain = torch.unique(certain)
        class_N = insert(self._negatives(step, label_G.device), certain)
        bias_S = None
        if self._correction:
            bias_N = torch.full(class_N.shape, -math.log(self._sampling.rate), device=class_N.device)
            bias_N[torch.searchsorted(class_N, certain)] = 0.0
            bias_S = bias_N.repeat_interleave(self._sub_centres)
        return self.rows_of(class_N), bias_S

    def classes(self, part: TakingPart) -> Tensor:
        """Their numbers, one for each class, ascending."""
        if part.rows is None:
            return torch.arange(self._shard.start, self._shard.stop, device=part.table.device)
        return part.rows[:: self._sub_centres] // self._sub_centres + self._shard.start

    def prefetch(self, step: int) -> None:
        """Sends for what is known of this step's rows, its negatives, and keeps the draw for it."""
        if self._sampling.rate == 1.0 or not self._store.can_prefetch:
            return
        class_N = self._sampling.negatives(step, self._shard, self._store.device)
        self._drawn = (step, class_N)
        self._store.prefetch(self.rows_of(class_N))

    def _negatives(self, step: int, device: torch.device) -> Tensor:
        """The step's drawn classes of the shard, ascending."""
        if self._drawn is not None and self._drawn[0] == step:
            return self._drawn[1]
        return self._sampling.negatives(step, self._shard, device)

    def rows_of(self, class_N: Tensor) -> Tensor:
        """Local rows of classes of the shard, whose centres stand together."""
        first_N = (class_N - self._shard.start) * self._sub_centres
        if self._sub_centres == 1:
            return first_N
        return (first_N[:, None] + torch.arange(self._sub_centres, device=class_N.device)).flatten()


def insert(ascending: Tensor, more: Tensor) -> Tensor:
    """The union of two ascending tensors without repeats, ascending, in O(their lengths); `more` is the short one."""
    place = torch.searchsorted(ascending, more)
    there = torch.zeros_like(more, dtype=torch.bool)
    if len(ascending):
        there = ascending[place.clamp(max=len(ascending) - 1)] == more
    place, more = place[~there], more[~there]
    union = ascending.new_empty(len(ascending) + len(more))
    is_new = torch.zeros_like(union, dtype=torch.bool)
    is_new[place + torch.arange(len(more), device=more.device)] = True
    union[is_new] = more
    union[~is_new] = ascending
    return union
