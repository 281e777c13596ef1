"""The global batch: every rank's features and labels, on every rank."""

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
    """Features and labels in rank order, equal on all ranks."""

    feat_GD: Tensor
    label_G: Tensor
    rows: list[int]  # how many of them each rank brought
    training: bool  # whether a gradient is wanted


def gather(
    feat_BD: Tensor,
    label_B: Tensor,
    num_classes: int,
    world: World,
    *,
    training: bool = False,
    name: str = "head/gather",
) -> GlobalBatch:
    """All features and labels in one all-gather. Their bits travel side by side, with the rank they come from, their
    dtype and whether the rank trains, so that batches of different sizes need no second exchange. A rank without rows
    does what the others do.

    Raises ValueError, on all ranks alike, for a label outside of [0, num_classes), for a batch without any row, and
    where features have another dtype, or are trained with, on some ranks only; CollectiveError where the dtypes'
    widths differ.
    """
    number = _DTYPES.index(feat_BD.dtype)
    origin_B = torch.full_like(label_B, 2 * (number * world.size + world.rank) + training, dtype=torch.int32)
    parts = [x.contiguous().view(torch.uint8) for x in (feat_BD, label_B[:, None], origin_B[:, None])]
    try:
        wire = world.all_gather(torch.cat(parts, dim=1), name=name)
    except CollectiveError as error:
        error.add_note(f"{world}: features of this rank are {feat_BD.dtype}, (B, {feat_BD.shape[1]})")
        raise
    widths = [part.shape[1] for part in parts]
    # (contiguous() would leave a single row with the stride of the whole wire, which no other dtype divides)
    feat, label, origin = (x.clone(memory_format=torch.contiguous_format) for x in wire.split(widths, dim=1))
    origin_G = origin.view(torch.int32).squeeze(1)
    shape = (len(_DTYPES), world.size, 2)
    counts = torch.bincount(origin_G, minlength=math.prod(shape)).view(shape).tolist()
    by_dtype = {dtype: by_rank for dtype, by_rank in zip(_DTYPES, counts, strict=True) if any(map(any, by_rank))}
    if not by_dtype:  # every rank sees all rows, so all raise the same error and none is left waiting in a collective
        raise ValueError("the global batch is empty: no rank brought a row")
    if len(by_dtype) > 1:
        words = [f"{dtype} on ranks {_ranks(map(sum, by_rank))}" for dtype, by_rank in by_dtype.items()]
        raise ValueError(f"features are {' and '.join(words)}; expected one dtype on all ranks")
    ((dtype, by_rank),) = by_dtype.items()
    evaluating, trained = zip(*by_rank, strict=True)
    batch = GlobalBatch(
        feat.view(dtype), label.view(torch.int64).squeeze(1), [sum(each) for each in by_rank], any(trained)
    )
    bad = ((batch.label_G < 0) | (batch.label_G >= num_classes)).nonzero().flatten()
    if len(bad):
        index = int(bad[0])
        rank = bisect(list(accumulate(batch.rows)), index)
        raise ValueError(
            f"label {int(batch.label_G[index])} at index {index - sum(batch.rows[:rank])} of rank {rank}'s batch is "
            f"outside of [0, {num_classes}) ({len(bad)} such label(s) in the global batch); check the data's labels, "
            "or raise num_classes"
        )
    if any(evaluating) and any(trained):
        raise ValueError(
            f"features require a gradient on ranks {_ranks(trained)} and none on ranks {_ranks(evaluating)}: all ranks "
            "train, or none does (under no_grad, or with features that do not require a gradient)"
        )
    return batch


def _ranks(counts: Iterable[int]) -> list[int]:
    return [rank for rank, count in enumerate(counts) if count]
