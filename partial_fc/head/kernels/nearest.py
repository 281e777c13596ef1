"""Collects the classes with the largest cosines of each feature, block by block.

Letters: G features, K nearest classes, P classes of a block.
"""

import torch
from torch import Tensor


class Nearest:
    """The k nearest classes of those that were added: cosine_GK, descending, and class_GK, int64; -inf and -1 if fewer
    were added. NaN comes first."""

    def __init__(self, num_rows: int, k: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.cosine_GK = torch.full((num_rows, k), -torch.inf, dtype=dtype, device=device)
        self.class_GK = torch.full((num_rows, k), -1, dtype=torch.int64, device=device)

    def add(self, cosine_GP: Tensor, class_P: Tensor) -> None:
        """Adds classes. cosine_GP: of this object's dtype; class_P: their numbers, int64."""
        k = self.cosine_GK.shape[1]
        near_GK, at_GK = cosine_GP.topk(min(k, len(class_P)), dim=1)
        classes = torch.cat([self.class_GK, class_P[at_GK]], dim=1)
        self.cosine_GK, at_GK = torch.cat([self.cosine_GK, near_GK], dim=1).topk(k, dim=1)
        self.class_GK = classes.gather(1, at_GK)

    def renumber(self, class_S: Tensor) -> None:
        """Replaces each class number i by class_S[i]."""
        if len(class_S):
            self.class_GK = class_S[self.class_GK.clamp(min=0)].where(self.class_GK >= 0, self.class_GK)
