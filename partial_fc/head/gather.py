"""The global batch: every rank's features and labels, on every rank."""

from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from partial_fc.comm import World


@dataclass(frozen=True)
class GlobalBatch:
    """Features and labels in rank order, equal on all ranks."""

    feat_GD: Tensor
    label_G: Tensor
    rows: list[int]  # how many of them each rank brought
    training: bool  # whether a gradient is wanted


@dataclass(frozen=True)
class _MakeUp:
    """Whose rows are how many, and what for; equal on all ranks."""

    origin_G: Tensor
    rows: list[int]
    training: bool


@dataclass
class Gather:
    """Brings the ranks' batches together, with one all-gather for each: features and labels travel side by side, as
    bits, with the rank that they come from and whether it trains, so that batches of different sizes need no second
    exchange. A rank without rows does what the others do.

    Steps are alike: the batch is taken to be made up as the last one was, until `settle` has seen numbers that say
    so. A device is so given all that depends on labels alone before the host waits for it once. Where the backend
    would first ask the ranks how many rows they bring, it is told what they brought the last time, and a rank that has
    another number now sends so many rows of no meaning, which tell all ranks to gather again."""

    num_classes: int
    world: World
    name: str = "head/gather"
    _last: _MakeUp | None = None
    _origin: tuple[object, Tensor] | None = None  # of this rank's rows, and what it depends on

    def __call__(self, feat_BD: Tensor, label_B: Tensor, training: bool = False) -> "Arrived":
        """Raises ValueError, on all ranks alike, for a batch without any row."""
        columns = (feat_BD, label_B[:, None], self._origin_of(label_B, training)[:, None])
        parts = [x.contiguous().view(torch.uint8) for x in columns]
        mine, rows = torch.cat(parts, dim=1), self._expected_rows()
        if rows is not None and rows[self.world.rank] != len(mine):
            mine = mine.new_full((rows[self.world.rank], mine.shape[1]), 255)  # origin -1
        wire = self.world.start_all_gather(mine, rows, name=self.name).wait()
        feat, label, origin = wire.split([part.shape[1] for part in parts], dim=1)
        label_G = _numbers(label, torch.int64).squeeze(1).contiguous()
        if not len(label_G):
            raise ValueError("the global batch is empty: no rank brought a row")
        return Arrived(_numbers(feat, feat_BD.dtype), label_G, _numbers(origin, torch.int32).squeeze(1))

    def facts(self, arrived: "Arrived") -> list[Tensor]:
        """Numbers of no dimension, on the device, for `settle`."""
        if self._last is None or len(self._last.origin_G) != len(arrived.origin_G):
            self._last = self._count(arrived)
        changed = (arrived.origin_G != self._last.origin_G).sum()
        return [*arrived.label_G.aminmax(), changed]

    def settle(self, arrived: "Arrived", lowest: int, highest: int, changed: int) -> GlobalBatch | None:
        """Returns None where, on all ranks alike, the batch has to be gathered again. Raises ValueError, on all ranks
        alike, for a label outside of [0, num_classes), and where some ranks train and others do not."""
        if self._last is None or changed:
            if int(arrived.origin_G.min()) < 0:
                self._last = None
                return None
            self._last = self._count(arrived)
        rows = self._last.rows
        if lowest < 0 or highest >= self.num_classes:
            self._refuse(arrived.label_G, rows)
        return GlobalBatch(arrived.feat_GD, arrived.label_G, rows, self._last.training)

    def _expected_rows(self) -> list[int] | None:
        """None: the backend finds out. (A rank that is expected to bring no row could not say that it has some.)"""
        if self._last is None or not self.world.asks_for_counts or not all(self._last.rows):
            return None
        return self._last.rows

    def _origin_of(self, label_B: Tensor, training: bool) -> Tensor:
        number = 2 * self.world.rank + training
        key = (len(label_B), label_B.device, number)
        if self._origin is None or self._origin[0] != key:
            self._origin = key, torch.full_like(label_B, number, dtype=torch.int32)
        return self._origin[1]

    def _count(self, arrived: "Arrived") -> _MakeUp:
        counts = torch.bincount(arrived.origin_G, minlength=2 * self.world.size).tolist()
        evaluating, trained = counts[::2], counts[1::2]
        if any(evaluating) and any(trained):
            raise ValueError(
                f"features require a gradient on ranks {_ranks(trained)} and none on ranks {_ranks(evaluating)}: all "
                "ranks train, or none does (under no_grad, or with features that do not require a gradient)"
            )
        rows = [a + b for a, b in zip(evaluating, trained, strict=True)]
        return _MakeUp(arrived.origin_G.clone(), rows, any(trained))

    def _refuse(self, label_G: Tensor, rows: list[int]) -> None:
        """Every rank sees all labels, so all raise the same error and none is left waiting in a collective."""
        bad = ((label_G < 0) | (label_G >= self.num_classes)).nonzero().flatten()
        index = int(bad[0])
        rank = bisect(list(accumulate(rows)), index)
        raise ValueError(
            f"label {int(label_G[index])} at index {index - sum(rows[:rank])} of rank {rank}'s batch is outside of "
            f"[0, {self.num_classes}) ({len(bad)} such label(s) in the global batch); check the data's labels, or "
            "raise num_classes"
        )


@dataclass(frozen=True)
class Arrived:
    """A global batch that nobody has looked at: labels may be anything."""

    feat_GD: Tensor
    label_G: Tensor
    origin_G: Tensor


def _numbers(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Some columns of rows of bytes, as what they are: where they lie, if numbers of this dtype may lie there."""
    if wire.stride(0) % dtype.itemsize or wire.storage_offset() % dtype.itemsize:
        wire = wire.clone(memory_format=torch.contiguous_format)
    return wire.view(dtype)


def _ranks(counts: list[int]) -> list[int]:
    return [rank for rank, count in enumerate(counts) if count]
