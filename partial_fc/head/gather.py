"""The global batch: every rank's features and labels, on every rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from partial_fc.comm import World


@dataclass(frozen=True)
class Batch:
    """In rank order."""

    feat_GD: Tensor
    label_G: Tensor
    rows: list[int]  # how many of them each rank brought


def gather(feat_BD: Tensor, label_B: Tensor, num_classes: int, world: World, *, name: str = "head/gather") -> Batch:
    """All features and labels in one all-gather. Their bits travel side by side, with the rank they come from, so
    that batches of different sizes need no second exchange.

    Raises ValueError, on all ranks alike, for a label outside of [0, num_classes) and for a batch without any row.
    """
    rank_B = torch.full_like(label_B, world.rank, dtype=torch.int32)
    parts = [x.contiguous().view(torch.uint8) for x in (feat_BD, label_B[:, None], rank_B[:, None])]
    wire = world.all_gather(torch.cat(parts, dim=1), name=name)
    widths = [part.shape[1] for part in parts]
    # (contiguous() would leave a single row with the stride of the whole wire, which no other dtype divides)
    feat, label, rank = (x.clone(memory_format=torch.contiguous_format) for x in wire.split(widths, dim=1))
    rank_G = rank.view(torch.int32).squeeze(1)
    batch = Batch(
        feat.view(feat_BD.dtype),
        label.view(torch.int64).squeeze(1),
        torch.bincount(rank_G, minlength=world.size).tolist(),
    )
    _check_labels(batch, num_classes)
    if not len(batch.label_G):
        raise ValueError("the global batch is empty: no rank brought a row")
    return batch


def _check_labels(batch: Batch, num_classes: int) -> None:
    """Every rank sees all labels, so all raise the same error and none is left waiting in a collective."""
    bad = ((batch.label_G < 0) | (batch.label_G >= num_classes)).nonzero().flatten()
    if not len(bad):
        return
    index, rank = int(bad[0]), 0
    while index >= batch.rows[rank]:
        index -= batch.rows[rank]
        rank += 1
    raise ValueError(
        f"label {int(batch.label_G[bad[0]])} at index {index} of rank {rank}'s batch is outside of [0, {num_classes}) "
        f"({len(bad)} such label(s) in the global batch); check the data's labels, or raise num_classes"
    )
