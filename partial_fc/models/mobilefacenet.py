"""MobileFaceNet (Chen et al., 2018, https://arxiv.org/abs/1804.07573), with arcface_torch's `mbf` widths.

Parameter names and shapes are those of arcface_torch, so its weights load without a mapping; hence the nested sequences
called `layers`, and the second convolution's 64 groups for 128 channels.

B images, H = W pixels, D feature width.
"""

import torch
from torch import Tensor, nn

from partial_fc.models.iresnet import PReLU
from partial_fc.models.sample_random import Dropout


class Wrapped(nn.Module):
    """A sequence under the name `layers`; `residual` adds the input to the output."""

    def __init__(self, *layers: nn.Module, residual: bool = False):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


def _convolution(
    width_in: int,
    width: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    padding: int | None = None,
    activation: bool = True,
) -> Wrapped:
    padding = kernel // 2 if padding is None else padding
    layers: list[nn.Module] = [
        nn.Conv2d(width_in, width, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(width),
    ]
    return Wrapped(*layers, *([PReLU(width)] if activation else []))


class Bottleneck(Wrapped):
    """Widens to `inner` channels, one 3x3 per channel, narrows again without an activation."""

    def __init__(self, width_in: int, width: int, inner: int, stride: int, residual: bool):
        super().__init__(
            _convolution(width_in, inner),
            _convolution(inner, inner, kernel=3, stride=stride, groups=inner),
            _convolution(inner, width, activation=False),
            residual=residual,
        )


def _stage(width: int, inner: int, depth: int) -> Wrapped:
    return Wrapped(*[Bottleneck(width, width, inner, stride=1, residual=True) for _ in range(depth)])


class MobileFaceNet(nn.Module):
    """Normalised image_B3HW (float) -> feat_BD (fp32), not L2-normalised: the head does that."""

    # As in arcface_torch everything from conv_sep on stays fp32, under autocast and beside 16-bit weights: the cosines
    # of millions of classes differ by less than the resolution of 16 bits.
    KEEPS_FP32 = ("conv_sep", "features")

    def __init__(self, embedding_size: int, image_size: int, in_channels: int = 3, dropout: float = 0.0):
        super().__init__()
        side = -(-image_size // 2**4)  # four halvings: a padded 3x3 with stride 2 rounds up
        self.layers = nn.ModuleList(
            [
                _convolution(in_channels, 128, kernel=3, stride=2),
                _convolution(128, 128, kernel=3, groups=64),
                Bottleneck(128, 128, inner=128, stride=2, residual=False),
                _stage(128, inner=128, depth=4),
                Bottleneck(128, 256, inner=256, stride=2, residual=False),
                _stage(256, inner=256, depth=6),
                Bottleneck(256, 256, inner=512, stride=2, residual=False),
                _stage(256, inner=256, depth=2),
            ]
        )
        self.conv_sep = _convolution(256, 512)
        # One weight per channel and position: faces are aligned, so averaging over positions would lose detail.
        self.features = Wrapped(
            _convolution(512, 512, kernel=side, groups=512, padding=0, activation=False),
            nn.Sequential(nn.Flatten(), Dropout(dropout)),
            nn.Linear(512, embedding_size, bias=False),
            nn.BatchNorm1d(embedding_size),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image_B3HW: Tensor) -> Tensor:
        x = image_B3HW
        for layer in self.layers:
            x = layer(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.features(self.conv_sep(x.to(next(self.conv_sep.parameters()).dtype)))
