"""The dense head of rows with several labels, in differentiable tensor operations, as head_reference.py is."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from partial_fc.head.margin import Margin, State
from partial_fc.head.rule import MLC, MLCD, MeanSoftmax, OwnOut, Rule, SoftTarget
from tests import head_reference as reference


def loss_of_labels(
    feat_GD: Tensor,
    label_GT: Tensor,
    weight_GT: Tensor,
    centre_CD: Tensor,
    margin: Margin,
    rule: Rule,
    sampled_S: Tensor | None = None,
    *,
    state: State | None = None,
    filter_above: float | None = None,
    sub_centres: int = 1,
    row_weight_G: Tensor | None = None,
) -> Tensor:
    """Returns the mean over the global batch of the rule's loss of rows with several labels.

    label_GT: class numbers, one of which may stand several times in a row; weight_GT: of feat_GD's dtype; 0: the label
    is none. The rest is as of `reference.loss`. The rules are written out again, as far as possible by cross_entropy.
    """
    num_classes = len(centre_CD) // sub_centres if sampled_S is None else len(sampled_S)
    if sampled_S is not None:
        row_S = (sampled_S[:, None] * sub_centres + torch.arange(sub_centres)).flatten()
        centre_CD = centre_CD[row_S]
        label_GT = torch.searchsorted(sampled_S, label_GT)
    state = margin.state() if state is None else state
    weight_GT = weight_GT / weight_GT.sum(dim=1, keepdim=True)
    weight_GC = (one_hot(label_GT, num_classes) * weight_GT[:, :, None]).sum(dim=1)
    own_GC = weight_GC > 0
    cos_GC = reference.cosines(feat_GD, centre_CD, sub_centres)
    plain_GC = margin.scale * replace(margin.negatives(None, state), filter_above=filter_above)(cos_GC)[0]
    norm_GC = feat_GD.detach().norm(dim=1)[:, None].expand_as(cos_GC)
    margin_GC = (margin.scale * margin.target(cos_GC.flatten(), norm_GC.flatten(), state)).view_as(cos_GC)

    others_GC = plain_GC.masked_fill(own_GC, -torch.inf)
    negative_sum_G = others_GC.exp().sum(dim=1)
    pull_G = (-margin_GC).masked_fill(~own_GC, -torch.inf).exp().sum(dim=1)
    match rule:
        case MeanSoftmax() | OwnOut():
            per_row_G = torch.zeros_like(negative_sum_G)
            for label_G, weight_G in zip(label_GT.unbind(1), weight_GT.unbind(1), strict=True):
                base_GC = plain_GC if isinstance(rule, MeanSoftmax) else others_GC
                logit_GC = torch.where(one_hot(label_G, num_classes).bool(), margin_GC, base_GC)
                per_row_G = per_row_G + weight_G * cross_entropy(logit_GC, label_G, reduction="none")
        case SoftTarget():
            logit_GC = torch.where(own_GC, margin_GC, plain_GC)
            per_row_G = logit_GC.logsumexp(dim=1) - (weight_GC * margin_GC).sum(dim=1)
        case MLC():
            per_row_G = (1 + negative_sum_G * pull_G).log()
        case MLCD():
            per_row_G = (1 + negative_sum_G).log() + (1 + pull_G).log()
        case _:
            raise TypeError(f"no reference of {rule}")
    return (per_row_G if row_weight_G is None else per_row_G * row_weight_G).mean()
