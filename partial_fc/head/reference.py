"""The whole head in one process, in plain differentiable tensor maths: what every other path is tested against."""

import torch
from torch import Tensor

from partial_fc.head.margin import Margin


def unit(x: Tensor) -> Tensor:
    """Rows scaled to length 1; a row of length 0 stays 0 and gets no gradient."""
    norm = x.norm(dim=1, keepdim=True)
    return torch.where(norm > 0, x / torch.where(norm > 0, norm, 1.0), torch.zeros_like(x))


def loss(
    feat_GD: Tensor, label_G: Tensor, centre_CD: Tensor, margin: Margin, sampled_S: Tensor | None = None
) -> Tensor:
    """Mean over the global batch of -log softmax(logit)[label], a scalar of feat_GD's dtype.

    sampled_S: the class numbers that take part, ascending and with every label among them; all when None.
    Forms the (G, C) logits, so it is for sizes at which that is no trouble; exact in float64.
    """
    if sampled_S is not None:
        centre_CD = centre_CD[sampled_S]
        label_G = torch.searchsorted(sampled_S, label_G)
    cos_GC = unit(feat_GD) @ unit(centre_CD).T
    own = torch.zeros_like(cos_GC, dtype=torch.bool)
    own[torch.arange(len(label_G)), label_G] = True
    with_margin_G1 = margin(cos_GC[own]).unsqueeze(1)
    logit_GC = margin.scale * torch.where(own, with_margin_G1, cos_GC)
    return torch.nn.functional.cross_entropy(logit_GC, label_G)
