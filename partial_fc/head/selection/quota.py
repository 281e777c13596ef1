"""InsightFace's quota: the classes of the batch are part of the sample, where otherwise they come on top of it.

All classes that take part in a step are then sample_rate * num_classes, or those of the batch alone where they are
more. arcface_torch counts so on each process, over its own classes; here it is counted over the classes of all ranks,
so that the sample does not depend on how many there are.

Letters: N classes of the draw, P classes of the batch, B blocks of classes, Q classes that are left out.
"""

import torch
from torch import Tensor

from partial_fc.counter_rng import derive_key, hash32
from partial_fc.head.selection.sampling import BLOCK, Draw
from partial_fc.head.shard import Shard


def within_quota(sampling: Draw, class_N: Tensor, label_G: Tensor, step: int, shard: Shard) -> Tensor:
    """The shard's negatives (class_N, as `sampling` draws them) without those for which the batch's classes leave no
    room. label_G: of all ranks, the same on all of them. Costs O(batch) beside one pass over class_N."""
    device, num_classes = class_N.device, sampling.num_classes
    class_P = torch.unique(label_G)
    room_B = _room(sampling.counts(step).to(device), class_P)

    # Of blocks that straddle ranks each rank needs the whole: the choice is the same on both.
    first, last = shard.start // BLOCK, -(-shard.stop // BLOCK)
    before = Shard(first * BLOCK, shard.start, num_classes)
    behind = Shard(shard.stop, min(last * BLOCK, num_classes), num_classes)
    more = [sampling.negatives(step, side, device) if len(side) else class_N[:0] for side in (before, behind)]
    whole_N = torch.cat((more[0], class_N, more[1]))

    edge_B = torch.searchsorted(whole_N, torch.arange(first, last + 1, device=device) * BLOCK)
    position_P, upto_P = (torch.searchsorted(whole_N, class_P, right=right) for right in (False, True))
    position_P = position_P[upto_P > position_P]  # those that were drawn, too
    drawn_B = torch.searchsorted(position_P, edge_B)
    others_B = (edge_B - drawn_B).diff()
    leave_B = others_B - room_B[first:last]
    # Of a block's others, so many at equal distances, from a place of the block and step's own on: all are as likely.
    block_Q = torch.arange(len(leave_B), device=device).repeat_interleave(leave_B)
    nth_Q = torch.arange(len(block_Q), device=device) - (leave_B.cumsum(0) - leave_B)[block_Q]
    key_B = hash32(torch.arange(first, last, device=device) + derive_key(sampling.seed, step, *b"quota"))
    turn_B = key_B % others_B.clamp(min=1)
    place_Q = ((nth_Q + 1) * others_B[block_Q] - turn_B[block_Q] - 1) // leave_B[block_Q]
    # Places among the others -> positions in the draw.
    place_Q += (edge_B - drawn_B)[block_Q]
    others_before_P = position_P - torch.arange(len(position_P), device=device)
    place_Q += torch.searchsorted(others_before_P, place_Q, right=True)
    stays_N = torch.ones_like(whole_N, dtype=torch.bool)
    stays_N[place_Q] = False
    mine = slice(len(more[0]), len(more[0]) + len(class_N))
    return class_N[stays_N[mine]]


def _room(drawn_B: Tensor, class_P: Tensor) -> Tensor:
    """How many classes besides the batch's take part, of each block: as many fewer than it draws as the batch has
    there. Where a block has more of the batch's than it draws, all blocks make up for it, each by its part. Whole
    numbers throughout: the same on every rank."""
    free_B = (drawn_B - torch.bincount(class_P // BLOCK, minlength=len(drawn_B))).clamp_(min=0)
    until_B, free = free_B.cumsum(0), (drawn_B.sum() - len(class_P)).clamp(min=0)
    upto_B = until_B * free // until_B[-1].clamp(min=1)
    return upto_B.diff(prepend=upto_B.new_zeros(1))
