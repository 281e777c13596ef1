"""The definition of an embedding: f(image) + f(flipped image), scaled to length 1. I images, D feature width."""

from collections.abc import Callable

import torch
from torch import Tensor


def unit_embeddings(
    forward: Callable[[Tensor], Tensor], image_I3HW: Tensor, flip: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns (embeddings of length 1 (I, D), mean length (I,) of the network's outputs for an image), float64 on the
    host.

    forward: uint8 RGB images (I, 3, H, W) on the host -> features (I, D), not normalised; in evaluation mode. flip: add
    the flipped image; off if that is of another class. Zero features give NaN.
    """
    sum_ID, norm_I = sum_of_views(forward, image_I3HW, flip)
    return sum_ID / sum_ID.norm(dim=1, keepdim=True), norm_I


def sum_of_views(forward: Callable[[Tensor], Tensor], image_I3HW: Tensor, flip: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the same with the network's length, for templates that weigh their images by it."""
    views = [image_I3HW, image_I3HW.flip(3)] if flip else [image_I3HW]
    feats = [forward(view).double().cpu() for view in views]
    norm_I = torch.stack([feat_ID.norm(dim=1) for feat_ID in feats]).mean(0)
    return torch.stack(feats).sum(0), norm_I
