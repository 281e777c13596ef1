"""Random layers of networks in training: dropout, stochastic depth, and the noise of patch masking.

Each number is a function of (seed, the sample's position in the data, the layer), as the augmentation of that sample:
resume is exact, and the number of ranks changes nothing. `SampleRandom.of(module)` finds a network's random layers;
the backbone names the samples before each forward. A layer that was never told them draws from torch's generator.

B samples.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from partial_fc import counter_rng

_IN_NETWORK = 3  # purpose of a key of `derive_key`; the data's order and loader use 0 to 2


class SampleRandom(nn.Module):
    """A layer that draws numbers for each sample. stream: differs between the random layers of a network."""

    def __init__(self, stream: int):
        super().__init__()
        self.stream = stream
        self._key = 0
        self._position_B: Tensor | None = None

    @staticmethod
    def of(module: nn.Module) -> list["SampleRandom"]:
        """Returns the random layers inside a module."""
        return [layer for layer in module.modules() if isinstance(layer, SampleRandom)]

    @staticmethod
    def name_samples(layers: Iterable["SampleRandom"], seed: int, position_B: Tensor) -> None:
        """Says which samples the next forward is over, until the next call; a repeated forward draws the same.
        position_B: int64, the samples' positions in the data, on the network's device."""
        for layer in layers:
            layer._key, layer._position_B = counter_rng.derive_key(seed, _IN_NETWORK, layer.stream), position_B

    def uniform(self, like_B: Tensor, width: int) -> Tensor:
        """Returns numbers in [0, 1) for the samples of like_B: float32 (B, width)."""
        if self._position_B is None:
            return torch.rand(len(like_B), width, device=like_B.device)
        assert len(self._position_B) == len(like_B), "these are other samples than those that were named"
        return counter_rng.uniform(self._position_B, width, self._key)


class Dropout(SampleRandom):
    """Zeroes a share p of a sample's values in training; the others grow by 1 / (1 - p)."""

    def __init__(self, p: float, stream: int = 0):
        super().__init__(stream)
        self.p = p

    def forward(self, x_BX: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x_BX
        kept = self.uniform(x_BX, x_BX[0].numel()).view(x_BX.shape) >= self.p
        return x_BX * kept.to(x_BX.dtype) / (1 - self.p)


class DropPath(Dropout):
    """Leaves out a residual branch for a share p of the samples in training; the others' branches grow by 1 / (1 - p).

    (Huang et al., 2016, "Deep Networks with Stochastic Depth", https://arxiv.org/abs/1603.09382.)
    """

    def forward(self, x_BX: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x_BX
        kept_B1 = self.uniform(x_BX, 1) >= self.p
        return x_BX * (kept_B1.to(x_BX.dtype) / (1 - self.p)).view(-1, *(1,) * (x_BX.dim() - 1))
