"""The rows that take part in a step on this rank: all, or those of the batch's classes and of sampled negatives."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from partial_fc.head.hard_negatives import HardNegatives
from partial_fc.head.quota import within_quota
from partial_fc.head.rows import RowTable
from partial_fc.head.sampling import Sampling
from partial_fc.head.shard import Shard


@dataclass(frozen=True)
class ActiveRows:
    """The rows of a step, fetched."""

    rows: Tensor | None  # local rows, ascending; None: all
    bias_S: Tensor | None  # -log of the probability that they are active; None: 0
    table: Tensor  # where the centres were fetched to
    row_S: Tensor | None  # the rows' positions in `table`; None: all of it


@dataclass
class RowSelector:
    """Chooses the active rows of each step. The sampled ones are known a step ahead."""

    sampling: Sampling
    shard: Shard
    sub_centres: int
    store: RowTable
    hard_negatives: HardNegatives | None
    correction: bool
    dtype: torch.dtype
    drawn: tuple[int, Tensor] | None = None  # (step, its negatives), where they were wanted early

    def fetch(self, label_G: Tensor, step: int) -> ActiveRows:
        """For a batch with these labels."""
        rows, bias_S = self._select(label_G, step)
        table, row_S = self.store.fetch(rows, step)
        return ActiveRows(rows, bias_S, table, row_S)

    def _select(self, label_G: Tensor, step: int) -> tuple[Tensor | None, Tensor | None]:
        """(active local rows, ascending; -log of the probability that they are active). None: all; 0."""
        if self.sampling.rate == 1.0:
            return None, None
        certain = label_G[(label_G >= self.shard.start) & (label_G < self.shard.stop)]
        if self.hard_negatives is not None:
            certain = torch.cat((certain, self.hard_negatives.classes(label_G, self.shard)))
        certain = torch.unique(certain)
        if self.drawn is not None and self.drawn[0] == step:
            negatives = self.drawn[1]
        else:
            negatives = self.sampling.negatives(step, self.shard, label_G.device)
        if self.sampling.quota == "insightface":
            negatives = within_quota(self.sampling, negatives, label_G, step, self.shard)
        class_N = insert(negatives, certain)
        bias_S = None
        if self.correction:
            log_rate = math.log(self.sampling.rate)
            bias_N = torch.full(class_N.shape, -log_rate, dtype=self.dtype, device=class_N.device)
            bias_N[torch.searchsorted(class_N, certain)] = 0.0
            bias_S = bias_N.repeat_interleave(self.sub_centres)
        return self._rows_of(class_N), bias_S

    def classes(self, active: ActiveRows) -> Tensor:
        """The numbers of their classes, each once, ascending."""
        if active.rows is None:
            return torch.arange(self.shard.start, self.shard.stop, device=active.table.device)
        return active.rows[:: self.sub_centres] // self.sub_centres + self.shard.start

    def prefetch(self, step: int) -> None:
        """Begins to bring what is known of this step's rows, its negatives, and keeps the draw for it."""
        if self.sampling.rate == 1.0 or not self.store.can_prefetch:
            return
        class_N = self.sampling.negatives(step, self.shard, self.store.device)
        self.drawn = (step, class_N)
        self.store.prefetch(self._rows_of(class_N))

    def _rows_of(self, class_N: Tensor) -> Tensor:
        """Local rows of classes of the shard, whose centres stand together."""
        first_N = (class_N - self.shard.start) * self.sub_centres
        return (first_N[:, None] + torch.arange(self.sub_centres, device=class_N.device)).flatten()


def insert(ascending: Tensor, more: Tensor) -> Tensor:
    """The union of two ascending tensors without repeats, ascending, in O(their lengths); `more` is the short one."""
    position = torch.searchsorted(ascending, more)
    present = torch.zeros_like(more, dtype=torch.bool)
    if len(ascending):
        present = ascending[position.clamp(max=len(ascending) - 1)] == more
    position, more = position[~present], more[~present]
    union = ascending.new_empty(len(ascending) + len(more))
    is_new = torch.zeros_like(union, dtype=torch.bool)
    is_new[position + torch.arange(len(more), device=more.device)] = True
    union[is_new] = more
    union[~is_new] = ascending
    return union
