"""The dense head in one process, in differentiable tensor operations: the reference of all tests."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from partial_fc.head.margin import Margin, State


def unit(x: Tensor) -> Tensor:
    """Returns the rows scaled to length 1; a row of length 0 stays 0 and gets no gradient."""
    norm = x.norm(dim=1, keepdim=True)
    return torch.where(norm > 0, x / torch.where(norm > 0, norm, 1.0), torch.zeros_like(x))


def cosines(feat_GD: Tensor, centre_CD: Tensor, sub_centres: int = 1) -> Tensor:
    """Returns the cosines (G, classes) with the nearest of each class's centres, whose rows are adjacent."""
    cos_GC = unit(feat_GD) @ unit(centre_CD).T
    return cos_GC.unflatten(1, (-1, sub_centres)).max(dim=2).values if sub_centres > 1 else cos_GC


def loss(
    feat_GD: Tensor,
    label_G: Tensor,
    centre_CD: Tensor,
    margin: Margin,
    sampled_S: Tensor | None = None,
    *,
    state: State | None = None,
    filter_above: float | None = None,
    sub_centres: int = 1,
    row_weight_G: Tensor | None = None,
) -> Tensor:
    """Returns the mean over the global batch of -log softmax(logit)[label], a scalar of feat_GD's dtype.

    sampled_S: the class numbers that take part, ascending and with every label among them; all when None.
    state: the margin's, already advanced to this step; that of the start when None.
    filter_above: other classes with a larger cosine are left out of the row's softmax.
    sub_centres: rows j*k to j*k + k-1 of centre_CD are class j, whose cosine is the largest of theirs.
    row_weight_G: what each row's loss is multiplied by before the mean; 1 when None.
    Forms the (G, C) logits, so it is for sizes at which that is no trouble; exact in float64.
    """
    if sampled_S is not None:
        row_S = (sampled_S[:, None] * sub_centres + torch.arange(sub_centres)).flatten()
        centre_CD = centre_CD[row_S]
        label_G = torch.searchsorted(sampled_S, label_G)
    state = margin.state() if state is None else state
    cos_GC = cosines(feat_GD, centre_CD, sub_centres)
    target_GC = one_hot(label_G, cos_GC.shape[1]).bool()

    negatives = replace(margin.negatives(cos_GC[target_GC].detach(), state), filter_above=filter_above)
    logit_GC = margin.scale * negatives(cos_GC)[0]
    target_G = margin.scale * margin.target(cos_GC[target_GC], feat_GD.detach().norm(dim=1), state)
    logit_GC = torch.where(target_GC, target_G[:, None], logit_GC)
    loss_G = cross_entropy(logit_GC, label_G, reduction="none")
    return (loss_G if row_weight_G is None else loss_G * row_weight_G).mean()
