"""What an embedding is: f(image) + f(mirrored image), scaled to length 1. The one place that says so.

I images of a batch, D feature width.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def unit_embeddings(
    forward: Callable[[Tensor], Tensor], image_I3HW: Tensor, flip: bool = True
) -> tuple[Tensor, Tensor]:
    """(embeddings of length 1 (I, D), mean length (I,) of what the network gave of an image), float64 on the host.

    forward: uint8 RGB images (I, 3, H, W) on the host -> features (I, D), not normalised; the network in evaluation
    mode. flip: the mirrored image counts too; off where it is of another class. Features without a direction give NaN.
    """
    sum_ID, norm_I = sum_of_views(forward, image_I3HW, flip)
    return sum_ID / sum_ID.norm(dim=1, keepdim=True), norm_I


def sum_of_views(forward: Callable[[Tensor], Tensor], image_I3HW: Tensor, flip: bool = True) -> tuple[Tensor, Tensor]:
    """The same, its length as the network gives it: where templates of several images weigh each by that."""
    views = [image_I3HW, image_I3HW.flip(3)] if flip else [image_I3HW]
    feats = [forward(view).double().cpu() for view in views]
    norm_I = torch.stack([feat_ID.norm(dim=1) for feat_ID in feats]).mean(0)
    return torch.stack(feats).sum(0), norm_I
