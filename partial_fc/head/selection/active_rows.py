"""Chooses the rows that take part in a step on this rank: all, or those of the batch's classes and sampled
negatives."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from partial_fc.head.kernels.nearest import Nearest
from partial_fc.head.selection.hard_negatives import HardNegatives
from partial_fc.head.selection.quota import within_quota
from partial_fc.head.selection.sampling import Draw
from partial_fc.head.shard import Shard

if TYPE_CHECKING:
    from partial_fc.head.rows import RowTable


@dataclass(frozen=True)
class ActiveRows:
    """The rows of a step, fetched."""

    rows: Tensor | None  # local rows, ascending; None: all
    table: Tensor  # where the centres were fetched to
    row_S: Tensor | None  # the rows' positions in `table`; None: all of it


@dataclass
class RowSelector:
    """Chooses the active rows of each step. The sampled ones are known a step ahead."""

    sampling: Draw
    shard: Shard
    sub_centres: int
    store: "RowTable"
    hard_negatives: HardNegatives | None
    on_device: Any = (
        None  # a kernels.triton_choice.DeviceChoice, which chooses instead, without a number that has to be waited for
    )
    _drawn: dict[int, Tensor] = field(default_factory=dict)  # a step's negatives, where they were wanted early

    def choose(self, label_G: Tensor, step: int) -> Tensor | None:
        """Chooses the classes of a batch with these labels: numbered from 0 in the shard, ascending; None: all."""
        if self.sampling.rate == 1.0:
            return None
        certain_M = label_G
        if self.hard_negatives is not None:
            certain_M = torch.cat((label_G, self.hard_negatives.listed(label_G)))
        is_here_M = (certain_M >= self.shard.start) & (certain_M < self.shard.stop)
        certain_M = torch.unique(certain_M[is_here_M] - self.shard.start)
        negatives = self._draw(step, label_G.device)
        if self.sampling.quota == "insightface":
            classes = within_quota(self.sampling, negatives + self.shard.start, label_G, step, self.shard)
            negatives = classes - self.shard.start
        return insert(negatives, certain_M)

    def fetch(self, class_P: Tensor | None, step: int, count: int | None = None) -> ActiveRows:
        """Fetches the rows of chosen classes. count: only the first so many; None: all."""
        rows = None if class_P is None else rows_of_classes(class_P[:count], self.sub_centres)
        table, row_S = self.store.fetch(rows, step)
        return ActiveRows(rows, table, row_S)

    def classes(self, active: ActiveRows) -> Tensor:
        """Returns the class numbers of active rows, each once, ascending."""
        if active.rows is None:
            return torch.arange(self.shard.start, self.shard.stop, device=active.table.device)
        return active.rows[:: self.sub_centres] // self.sub_centres + self.shard.start

    def renumber(self, nearest: Nearest, active: ActiveRows) -> None:
        """Turns positions among the active classes into class numbers."""
        if active.rows is None:
            nearest.class_GK += self.shard.start * (nearest.class_GK >= 0)
        else:
            nearest.renumber(self.classes(active))

    def prefetch(self, step: int) -> None:
        """Draws this step's negatives ahead and starts to fetch their rows, if either takes time."""
        if self.sampling.rate == 1.0:
            return
        if self.on_device is not None:
            self.on_device.prepare(step)
        elif self.store.can_prefetch:
            self._drawn = {step: self._draw(step, self.store.device)}
            self.store.prefetch(rows_of_classes(self._drawn[step], self.sub_centres))

    def _draw(self, step: int, device: torch.device) -> Tensor:
        """The step's negatives, numbered from 0 in the shard, ascending."""
        if step in self._drawn:
            return self._drawn[step]
        return self.sampling.negatives(step, self.shard, device) - self.shard.start


def rows_of_classes(class_N: Tensor, sub_centres: int) -> Tensor:
    """Returns the local rows of classes of the shard, whose centres stand together."""
    if sub_centres == 1:
        return class_N
    return (class_N[:, None] * sub_centres + torch.arange(sub_centres, device=class_N.device)).flatten()


def insert(ascending: Tensor, more: Tensor) -> Tensor:
    """Returns the union of two ascending tensors without repeats, ascending, in O(their lengths); `more` is the short
    one."""
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
