"""Gathers the ranks' features and labels into the global batch."""

import math
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from partial_fc.comm import CollectiveError, World

FEATURE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# The number of one of them travels with each row. (uint8: no features, as in `prepare`.)
_DTYPES = (torch.uint8, *FEATURE_DTYPES)


@dataclass(frozen=True)
class GlobalBatch:
    """Features and labels of all ranks in rank order, equal on all of them."""

    feat_GD: Tensor
    label_G: Tensor  # (G,), or (G, T) with several labels
    weight_GT: Tensor | None  # float64, of several labels
    row_weight_G: Tensor | None  # float64, of each row's loss
    rows: list[int]  # how many of them each rank brought
    training: bool  # whether a gradient is wanted


@dataclass(frozen=True)
class _MakeUp:
    """Whose rows are how many, of what and what for; equal on all ranks."""

    origin_G: Tensor
    rows: list[int]
    training: bool
    dtype: torch.dtype  # of the features
    width: int  # bytes of a row on its way


@dataclass
class Gather:
    """Gathers the ranks' batches with one all-gather each: features, labels, weights of several labels and of rows
    travel side by side, as bits, with the rank that they come from, their dtype and whether the rank trains, so that
    batches of different sizes need no second exchange. A rank without rows does what the others do.

    Steps are alike: the batch is taken to be made up as the last one was, until `settle` has seen numbers that say
    so. A device is so given all that depends on labels alone before the host waits for it once. Where the backend
    would first ask the ranks how many rows they bring, it is told what they brought the last time, and a rank that has
    another number now, or others, sends so many rows of no meaning, which tell all ranks to gather again."""

    num_classes: int
    world: World
    name: str = "head/gather"
    _last: _MakeUp | None = None
    _origin: tuple[object, Tensor] | None = None  # of this rank's rows, and what it depends on

    def __call__(
        self,
        feat_BD: Tensor,
        label_B: Tensor,
        training: bool = False,
        weight_BT: Tensor | None = None,
        row_weight_B: Tensor | None = None,
    ) -> "Arrived":
        """label_B: (B,), or (B, T) with weight_BT, float64, as is row_weight_B. Raises ValueError, on all ranks alike,
        for a batch without any row; CollectiveError where the dtypes' widths, or the numbers of labels, differ, or some
        ranks bring weights."""
        origin_B = self._origin_of(feat_BD, label_B, training)
        columns = {"label": label_B, "weight": weight_BT, "row_weight": row_weight_B}
        wide = {name: x if x.dim() == 2 else x[:, None] for name, x in columns.items() if x is not None}
        together = (feat_BD, *wide.values(), origin_B[:, None])
        mine = torch.cat([x.contiguous().view(torch.uint8) for x in together], dim=1)
        widths = {name: 8 * x.shape[1] for name, x in wide.items()}
        expected = self._expected()
        if expected is not None and (expected.rows[self.world.rank], expected.width) != mine.shape:
            mine = mine.new_full((expected.rows[self.world.rank], expected.width), 255)  # origin -1
            widths = {"label": 8}
        try:
            rows = None if expected is None else expected.rows
            wire = self.world.start_all_gather(mine, rows, name=self.name).wait()
        except CollectiveError as error:
            kind = f"{feat_BD.dtype}, (B, {feat_BD.shape[1]}), with labels {('B', *label_B.shape[1:])}"
            kind += "" if row_weight_B is None else " and weights of rows"
            error.add_note(f"{self.world}: features of this rank are {kind}")
            raise
        if not len(wire):
            raise ValueError("the global batch is empty: no rank brought a row")
        parts = [wire.shape[1] - sum(widths.values()) - 4, *widths.values(), 4]
        feat, *numbers, origin = wire.split(parts, dim=1)
        found = dict(zip(widths, numbers, strict=True))
        weights = {name: _numbers(found[name], torch.float64) for name in found.keys() - {"label"}}
        label_G = _numbers(found["label"], torch.int64).contiguous()
        label_G = label_G if "weight" in weights else label_G.squeeze(1)
        row_weight_G = weights["row_weight"].squeeze(1) if "row_weight" in weights else None
        origin_G = _numbers(origin, torch.int32).squeeze(1)
        return Arrived(feat, label_G, weights.get("weight"), row_weight_G, origin_G, wire.shape[1])

    def expected_origin(self, arrived: "Arrived") -> Tensor:
        """Returns the expected `origin_G`, int32 (G,). The number of rows that differ is an argument of `settle`."""
        if self._last is None or len(self._last.origin_G) != len(arrived.origin_G):
            self._last = self._count(arrived)
        return self._last.origin_G

    def settle(self, arrived: "Arrived", lowest: int, highest: int, changed: int) -> GlobalBatch | None:
        """Checks an arrived batch and returns it. lowest, highest: of the labels; changed: how many rows are not made
        up as expected.

        Returns None where, on all ranks alike, the batch has to be gathered again. Raises ValueError, on all ranks
        alike, for a label outside of [0, num_classes), and where features have another dtype, or the head trains, on
        some ranks only."""
        if self._last is None or changed:
            if int(arrived.origin_G.min()) < 0:
                self._last = None
                return None
            self._last = self._count(arrived)
        rows = self._last.rows
        if lowest < 0 or highest >= self.num_classes:
            self._refuse(arrived.label_G, rows)
        feat_GD = _numbers(arrived.feat_GD, self._last.dtype)
        weights = arrived.weight_GT, arrived.row_weight_G
        return GlobalBatch(feat_GD, arrived.label_G, *weights, rows, self._last.training)

    def _expected(self) -> _MakeUp | None:
        """None: the backend finds out. (A rank that is expected to bring no row could not say that it has some.)"""
        if self._last is None or not self.world.asks_for_counts or not all(self._last.rows):
            return None
        return self._last

    def _origin_of(self, feat_BD: Tensor, label_B: Tensor, training: bool) -> Tensor:
        number = 2 * (_DTYPES.index(feat_BD.dtype) * self.world.size + self.world.rank) + training
        key = (len(label_B), label_B.device, number)
        if self._origin is None or self._origin[0] != key:
            self._origin = key, torch.full((len(label_B),), number, dtype=torch.int32, device=label_B.device)
        return self._origin[1]

    def _count(self, arrived: "Arrived") -> _MakeUp:
        shape = (len(_DTYPES), self.world.size, 2)
        counts = torch.bincount(arrived.origin_G, minlength=math.prod(shape)).view(shape).tolist()
        by_dtype = {dtype: by_rank for dtype, by_rank in zip(_DTYPES, counts, strict=True) if any(map(any, by_rank))}
        if len(by_dtype) > 1:
            words = [f"{dtype} on ranks {_ranks(map(sum, by_rank))}" for dtype, by_rank in by_dtype.items()]
            raise ValueError(f"features are {' and '.join(words)}; expected one dtype on all ranks")
        ((dtype, by_rank),) = by_dtype.items()
        evaluating, trained = zip(*by_rank, strict=True)
        if any(evaluating) and any(trained):
            raise ValueError(
                f"ranks {_ranks(trained)} train and ranks {_ranks(evaluating)} do not: expected all or none under "
                "torch.no_grad() or in eval() mode"
            )
        rows = [sum(each) for each in by_rank]
        return _MakeUp(arrived.origin_G.clone(), rows, any(trained), dtype, arrived.width)

    def _refuse(self, label_G: Tensor, rows: list[int]) -> None:
        """Every rank sees all labels, so all raise the same error and none is left waiting in a collective."""
        bad = (label_G < 0) | (label_G >= self.num_classes)
        index = int(bad.nonzero()[0, 0])  # of the row
        rank = bisect(list(accumulate(rows)), index)
        raise ValueError(
            f"label {int(label_G[bad][0])} at index {index - sum(rows[:rank])} of rank {rank}'s batch is outside of "
            f"[0, {self.num_classes}) ({int(bad.sum())} such label(s) in the global batch); check the data's "
            "labels, or raise num_classes"
        )


@dataclass(frozen=True)
class Arrived:
    """A global batch before its checks: labels may be any integers."""

    feat_GD: Tensor  # as bytes
    label_G: Tensor
    weight_GT: Tensor | None
    row_weight_G: Tensor | None
    origin_G: Tensor
    width: int  # bytes of a row


def _numbers(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Some columns of rows of bytes, as what they are: where they lie, if numbers of this dtype may lie there."""
    if wire.stride(0) % dtype.itemsize or wire.storage_offset() % dtype.itemsize:
        wire = wire.clone(memory_format=torch.contiguous_format)
    return wire.view(dtype)


def _ranks(counts: Iterable[int]) -> list[int]:
    return [rank for rank, count in enumerate(counts) if count]
