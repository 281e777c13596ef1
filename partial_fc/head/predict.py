"""Predicts with a sharded head: the classes nearest to a feature, logits of chosen classes, centres by class number.

All are collectives: every rank calls them, with as many features as it likes, also none. Nothing learns from them.

Letters: B features of this rank, G of all ranks, K nearest classes, N classes asked for,
D feature width.
"""

import torch
from torch import Tensor

from partial_fc.comm import World
from partial_fc.head.gather import FEATURE_DTYPES
from partial_fc.head.interop.module import HeadModule
from partial_fc.head.kernels import Logits
from partial_fc.head.kernels.nearest import Nearest
from partial_fc.head.kernels.unit import unit
from partial_fc.head.margin import Negatives
from partial_fc.head.selection.batches import class_numbers
from partial_fc.head.softmax import own_arithmetic

MOST = 100  # nearest classes


def topk(head: HeadModule, feat_BD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k nearest classes of each feature: (cosine_BK in the head's dtype, falling; class_BK int64).

    Exact over all classes, sampled in training or not, with products of float32 (float64 where the head computes in
    it). Of several sub-centres of a class the nearest counts; margins play no part; classes of equal cosines come in
    any order. The kernel passes over the centres once and never has (B, C) numbers. Three collectives: the numbers of
    rows, head/predict/features 4*B*D bytes, head/predict/nearest 16*G*K bytes. With sampling and catch_up="exact" the
    first call after a step copies the centres, and the copy stays until the next step. Raises ValueError for k outside
    of [1, min(100, num_classes)] and features of another width or dtype.
    """
    check_k(head, k)
    with own_arithmetic(head.store.device):
        _check_features(head, feat_BD)
        rows_W = _rows(head, feat_BD)
        own_BD = feat_BD.detach().to(head.dtype)
        unit_GD = unit(head.world.start_all_gather(own_BD, rows_W, name="head/predict/features").wait())[0]
        target_G = torch.full((len(unit_GD),), -1, device=unit_GD.device)
        table, scale = head.store.centres_now(), head.margin.scale
        logits = Logits(unit_GD, table, None, target_G, scale, Negatives(), sub_centres=head.sub_centres)
        nearest = head.kernel.nearest(logits, k)
        nearest.class_GK += head.shard.start * (nearest.class_GK >= 0)
        return of_own_rows(head.world, nearest, rows_W, "head/predict/nearest")


def check_k(head: HeadModule, k: int) -> None:
    """Raises ValueError for a number of nearest classes that `topk` does not take."""
    most = min(MOST, head.num_classes)
    if not 1 <= k <= most:
        raise ValueError(f"{head.world}: k is {k}; expected 1 to {most}")


def of_own_rows(world: World, nearest: Nearest, rows_W: list[int], name: str) -> tuple[Tensor, Tensor]:
    """Returns the nearest classes of this rank's features over all ranks, (cosine_BK, class_BK), from those of all
    features among each rank's classes. rows_W: how many features each rank has. A collective of 16*G*K bytes."""
    if world.size == 1:
        return nearest.cosine_GK, nearest.class_GK
    k, num_own = nearest.cosine_GK.shape[1], rows_W[world.rank]
    packed_GK2 = torch.stack([nearest.cosine_GK.double(), nearest.class_GK.double()], dim=2)  # classes are below 2^53
    found = world.start_all_to_all(packed_GK2, rows_W, [num_own] * world.size, name=name).wait()
    # Ranks have ascending classes, so the first of equal cosines is that of the smallest class.
    candidates = found.unflatten(0, (world.size, num_own)).transpose(0, 1).flatten(1, 2)
    cosine_BK, at_BK = candidates[:, :, 0].sort(dim=1, descending=True, stable=True)
    class_BK = candidates[:, :, 1].gather(1, at_BK[:, :k])
    return cosine_BK[:, :k].to(nearest.cosine_GK.dtype), class_BK.long()


def among_all(nearest: tuple[Tensor, Tensor], kept_B: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the nearest classes of all rows, from those of the kept ones; -inf and -1 in the others."""
    cosine_BK, class_BK = (
        t.new_full((len(kept_B), t.shape[1]), none) for t, none in zip(nearest, (-torch.inf, -1), strict=True)
    )
    return cosine_BK.masked_scatter_(kept_B[:, None], nearest[0]), class_BK.masked_scatter_(kept_B[:, None], nearest[1])


def logits(head: HeadModule, feat_BD: Tensor, class_N: Tensor) -> Tensor:
    """Returns the logits of some classes without margin: scale * cosine, (B, N) in the head's dtype. class_N: int64,
    any classes, this rank's own choice. A collective (`centres_of`)."""
    _check_features(head, feat_BD)
    centre = centres_of(head, class_N)
    with own_arithmetic(head.store.device):
        unit_RD = unit(centre.reshape(-1, head.embedding_size).to(head.dtype))[0]  # all sub-centres
        cosine_BR = unit(feat_BD.detach().to(head.dtype))[0] @ unit_RD.T
        cosine_BN = cosine_BR.unflatten(1, (len(class_N), head.sub_centres)).amax(2)
        return cosine_BN * head.margin.scale


def centres_of(head: HeadModule, class_N: Tensor) -> Tensor:
    """Returns the centres of some classes after all steps so far, (N, D) or (N, sub_centres, D), in the dtype that they
    are stored in. class_N: int64, this rank's own choice, in any order. Two collectives: head/predict/classes, an
    all-gather of 8*N bytes, and head/predict/centres. Raises ValueError, on all ranks alike, for a class outside of [0,
    num_classes)."""
    with own_arithmetic(head.store.device):
        class_N = classes_of(class_N).to(head.store.device)
        rows_W = _rows(head, class_N)
        class_G = head.world.start_all_gather(class_N, rows_W, name="head/predict/classes").wait()
        if len(class_G) and not 0 <= int(class_G.min()) <= int(class_G.max()) < head.num_classes:
            raise ValueError(
                f"{head.world}: classes {int(class_G.min())} to {int(class_G.max())}; expected [0, {head.num_classes})"
            )
        local_G, elsewhere_G = head.shard.locate(class_G)
        centre = head.centres
        mine = [part[~away] for part, away in zip(local_G.split(rows_W), elsewhere_G.split(rows_W), strict=True)]
        owner_N = head.rank_of(class_N)
        arriving = torch.bincount(owner_N, minlength=head.world.size).tolist()
        sent = centre.index_select(0, torch.cat(mine).to(centre.device)).to(head.store.device)
        found = head.world.start_all_to_all(
            sent, [len(part) for part in mine], arriving, name="head/predict/centres"
        ).wait()
        order = owner_N.argsort(stable=True)  # each rank sends them in the order in which they were asked for
        return torch.empty_like(found).index_copy_(0, order, found)


def classes_of(class_N: Tensor) -> Tensor:
    """Returns class numbers as int64. Raises TypeError for what is no tensor, ValueError for one of other numbers."""
    if not isinstance(class_N, Tensor):
        raise TypeError(f"classes are {type(class_N).__name__}; expected numbers in a tensor, as torch.tensor([0, 1])")
    return class_numbers(class_N)


def _rows(head: HeadModule, t: Tensor) -> list[int]:
    """How many rows every rank has."""
    count = torch.tensor([len(t)], device=head.store.device)
    return head.world.all_gather(count, name="head/predict/rows").tolist()


def _check_features(head: HeadModule, feat_BD: Tensor) -> None:
    if not isinstance(feat_BD, Tensor):
        raise TypeError(f"{head.world}: features are {type(feat_BD).__name__}; expected a tensor")
    if feat_BD.dim() != 2 or feat_BD.shape[1] != head.embedding_size or feat_BD.dtype not in FEATURE_DTYPES:
        raise ValueError(
            f"{head.world}: features {tuple(feat_BD.shape)} of {feat_BD.dtype}; expected (B, {head.embedding_size}), "
            f"one of {FEATURE_DTYPES}"
        )
