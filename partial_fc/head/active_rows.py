"""The rows that take part in a step on this rank: all, or those of the batch's classes and of sampled negatives."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partial_fc.head.hard_negatives import HardNegatives
from partial_fc.head.quota import within_quota
from partial_fc.head.rows import RowTable
from partial_fc.head.sampling import Sampling
from partial_fc.head.shard import Located, Shard

# On a device draws are made for some steps at once, as many as come to so many numbers: work is launched for all.
_DRAWN_AHEAD = 1 << 20
_MOST_STEPS = 32


@dataclass(frozen=True)
class ActiveRows:
    """The rows of a step, fetched."""

    rows: Tensor | None  # local rows, ascending; None: all
    bias_S: Tensor | None  # -log of the probability that they are active; None: 0
    table: Tensor  # where the centres were fetched to
    row_S: Tensor | None  # the rows' positions in `table`; None: all of it


@dataclass(frozen=True)
class Chosen:
    """The classes of a step, whose number the host need not know yet."""

    class_P: Tensor | None  # of the shard, numbered from 0, ascending, the first `count`; None: all
    certain_M: Tensor | None  # those that take part whatever was drawn, in any order; others stand for none
    count: Tensor | None  # int64, of no dimension; None: class_P has no other numbers


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
    # Whether shapes that depend on numbers are avoided: a device's numbers have to be waited for.
    fixed_shapes: bool = field(init=False)
    _drawn: dict[int, Tensor] = field(default_factory=dict)  # steps' negatives, where they were wanted early

    def __post_init__(self) -> None:
        self.fixed_shapes = (
            self.store.device.type != "cpu" and not self.store.can_prefetch and self.sampling.quota != "insightface"
        )

    def choose(self, label_G: Tensor, located: Located, step: int) -> Chosen:
        """For a batch with these labels, which are located there. With fixed_shapes they may be any integers: nobody
        need have looked at them."""
        if self.sampling.rate == 1.0:
            return Chosen(None, None, None)
        certain = [located]
        if self.hard_negatives is not None:
            certain.append(self.shard.locate(self.hard_negatives.listed(label_G)))
        if self.fixed_shapes:
            # A number beyond all others stands for none.
            numbers = [each.local_N.masked_fill(each.elsewhere_N, len(self.shard)) for each in certain]
            return union(self._drawn_ahead(step), *numbers)
        certain_M = torch.unique(torch.cat([each.local_N[~each.elsewhere_N] for each in certain]))
        negatives = self._draw(step, label_G.device)
        if self.sampling.quota == "insightface":
            classes = within_quota(self.sampling, negatives + self.shard.start, label_G, step, self.shard)
            negatives = classes - self.shard.start
        return Chosen(insert(negatives, certain_M), certain_M, None)

    def fetch(self, chosen: Chosen, count: int | None, step: int) -> ActiveRows:
        """count: what `chosen.count` holds."""
        rows = bias_S = None
        if chosen.class_P is not None and chosen.certain_M is not None:
            class_N = chosen.class_P[:count]
            rows = self._rows_of(class_N)
            if self.correction:
                bias_S = self._bias(class_N, chosen.certain_M)
        table, row_S = self.store.fetch(rows, step)
        return ActiveRows(rows, bias_S, table, row_S)

    def _bias(self, class_N: Tensor, certain_M: Tensor) -> Tensor:
        # One place more, for what is not there.
        bias_N = class_N.new_full((len(class_N) + 1,), -math.log(self.sampling.rate), dtype=self.dtype)
        bias_N.index_fill_(0, torch.searchsorted(class_N, certain_M), 0.0)
        return bias_N[:-1].repeat_interleave(self.sub_centres)

    def classes(self, active: ActiveRows) -> Tensor:
        """The numbers of their classes, each once, ascending."""
        if active.rows is None:
            return torch.arange(self.shard.start, self.shard.stop, device=active.table.device)
        return active.rows[:: self.sub_centres] // self.sub_centres + self.shard.start

    def prefetch(self, step: int) -> None:
        """Draws this step's negatives, where that or their rows take time to arrive, and sends for the rows."""
        if self.sampling.rate == 1.0:
            return
        if self.fixed_shapes:
            self._drawn_ahead(step)
        elif self.store.can_prefetch:
            self._drawn = {step: self._draw(step, self.store.device)}
            self.store.prefetch(self._rows_of(self._drawn[step]))

    def _draw(self, step: int, device: torch.device) -> Tensor:
        """The step's negatives, numbered from 0 in the shard, ascending."""
        if step in self._drawn:
            return self._drawn[step]
        return self.sampling.negatives(step, self.shard, device) - self.shard.start

    def _drawn_ahead(self, step: int) -> Tensor:
        """The same in no order; some stand for none."""
        if step not in self._drawn:
            sampled = int(self.sampling.rate * len(self.shard)) + 1
            num_steps = min(max(1, _DRAWN_AHEAD // sampled), _MOST_STEPS)
            drawn = self.sampling.ahead(step, num_steps, self.shard, self.store.device)
            self._drawn = dict(enumerate(drawn.unbind(), start=step))
        return self._drawn[step]

    def _rows_of(self, class_N: Tensor) -> Tensor:
        """Local rows of classes of the shard, whose centres stand together."""
        if self.sub_centres == 1:
            return class_N
        sub_M = torch.arange(self.sub_centres, device=class_N.device)
        return (class_N[:, None] * self.sub_centres + sub_M).flatten()


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


def union(drawn_P: Tensor, *certain: Tensor) -> Chosen:
    """The union of tensors in any order, with repeats, without waiting for a number. drawn_P: as `Sampling.ahead` has
    it. Sorts: more work than `insert`, in fewer and larger pieces."""
    certain_M = torch.cat(certain) if len(certain) > 1 else certain[0]
    ascending = torch.cat((drawn_P, certain_M)).sort().values
    place = (ascending[1:] != ascending[:-1]).cumsum(0)
    each = torch.empty_like(ascending).scatter_(0, place, ascending[1:])
    # Below all classes are the two ends that `ahead` puts there (two, so that what follows is aligned to 16 bytes), and
    # above them the one number that stands for none.
    return Chosen(each[2:], certain_M, place[-1] - 2)
