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


def gather(
    feat_BD: Tensor,
    label_B: Tensor,
    num_classes: int,
    world: World,
    *,
    training: bool = False,
    name: str = "head/gather",
) -> GlobalBatch:
    """All features and labels in one all-gather. Their bits travel side by side, with the rank they come from and
    whether it trains, so that batches of different sizes need no second exchange. A rank without rows does what the
    others do.

    Raises ValueError, on all ranks alike, for a label outside of [0, num_classes), for a batch without any row, and
    where some ranks train and others do not.
    """
    origin_B = torch.full_like(label_B, 2 * world.rank + training, dtype=torch.int32)
    parts = [x.contiguous().view(torch.uint8) for x in (feat_BD, label_B[:, None], origin_B[:, None])]
    wire = world.all_gather(torch.cat(parts, dim=1), name=name)
    widths = [part.shape[1] for part in parts]
    # (contiguous() would leave a single row with the stride of the whole wire, which no other dtype divides)
    feat, label, origin = (x.clone(memory_format=torch.contiguous_format) for x in wire.split(widths, dim=1))
    origin_G = origin.view(torch.int32).squeeze(1)
    counts = torch.bincount(origin_G, minlength=2 * world.size).tolist()
    evaluating, trained = counts[::2], counts[1::2]
    batch = GlobalBatch(
        feat.view(feat_BD.dtype),
        label.view(torch.int64).squeeze(1),
        [a + b for a, b in zip(evaluating, trained, strict=True)],
        any(trained),
    )
    bad = ((batch.label_G < 0) | (batch.label_G >= num_classes)).nonzero().flatten()
    if len(bad):  # every rank sees all labels, so all raise the same error and none is left waiting in a collective
        index = int(bad[0])
        rank = bisect(list(accumulate(batch.rows)), index)
        raise ValueError(
            f"label {int(batch.label_G[index])} at index {index - sum(batch.rows[:rank])} of rank {rank}'s batch is "
            f"outside of [0, {num_classes}) ({len(bad)} such label(s) in the global batch); check the data's labels, "
            "or raise num_classes"
        )
    if not len(batch.label_G):
        raise ValueError("the global batch is empty: no rank brought a row")
    if any(evaluating) and any(trained):
        raise ValueError(
            f"features require a gradient on ranks {_ranks(trained)} and none on ranks {_ranks(evaluating)}: all ranks "
            "train, or none does (under no_grad, or with features that do not require a gradient)"
        )
    return batch


def _ranks(counts: list[int]) -> list[int]:
    return [rank for rank, count in enumerate(counts) if count]
