"""The residual network of InsightFace: `iresnet` in arcface_torch, `fresnet` with unit 3 in its trainer of 2020.

Parameter names and shapes are those of arcface_torch, so its weights load without a mapping.

B images, H = W pixels, D feature width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from partial_fc.models.sample_random import Dropout


class PReLU(nn.PReLU):
    """torch's PReLU with one slope a channel; equal results, but a 16-bit slope's gradient is summed and kept in fp32.

    On a CPU torch's backward runs element by element and takes two and a half (fp32) to three and a half times (bf16)
    as long as these whole-tensor operations (docs/log.md, 2026-11-23).
    """

    def forward(self, input: Tensor) -> Tensor:
        # On other devices, and without backward (evaluation, export), torch's own is as fast.
        if input.device.type != "cpu" or not (self.training and torch.is_grad_enabled()):
            return super().forward(input)
        return _PReLU.apply(input, self.weight)


class _PReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope_C: Tensor) -> Tensor:
        ctx.save_for_backward(x, slope_C)
        return F.prelu(x, slope_C.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, slope_C = ctx.saved_tensors
        above = torch.ops.aten.threshold_backward(dy, x, 0)  # dy where x > 0, else 0
        below = dy - above
        dx = torch.addcmul(above, below, slope_C.to(dy.dtype).view(-1, *(1,) * (x.dim() - 2)))
        axes = [axis for axis in range(x.dim()) if axis != 1]
        return dx, below.mul_(x).sum(axes, dtype=slope_C.dtype)


DEPTHS = {
    "r18": (2, 2, 2, 2),
    "r34": (3, 4, 6, 3),
    "r50": (3, 4, 14, 3),
    "r100": (3, 13, 30, 3),
    "r200": (6, 26, 60, 6),
}
# Networks for a CPU and small images: blocks of three stages, and whether the first convolution of a block has its
# stride, which saves three quarters of that convolution.
SMALL = {"tiny": ((2, 1, 1), False), "mini": ((1, 2, 1), True)}


Activation = Callable[[int], nn.Module]  # takes the number of channels, for PReLU's slopes


class Block(nn.Module):
    """BN, 3x3, BN, PReLU, 3x3 (with the stride), BN, plus the input, without activation after the sum. stride_first:
    the first 3x3 has the stride."""

    def __init__(self, width_in: int, width: int, stride: int, activation: Activation, stride_first: bool = False):
        super().__init__()
        first, second = (stride, 1) if stride_first else (1, stride)
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=first, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.prelu = activation(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=second, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.prelu(self.bn2(self.conv1(self.bn1(x))))
        return self.bn3(self.conv2(y)) + self.downsample(x)


class IResNet(nn.Module):
    """Normalised image_B3HW (float) -> feat_BD (fp32), not L2-normalised: the head does that.

    depths, widths: blocks and channels of each stage. strides: of the stem and then of each stage. stride_first: see
    Block.
    """

    # As in arcface_torch the last product and its statistics stay fp32, under autocast and beside 16-bit weights: the
    # cosines of millions of classes differ by less than the resolution of 16 bits.
    KEEPS_FP32 = ("fc", "features")

    def __init__(
        self,
        depths: Sequence[int],
        embedding_size: int,
        image_size: int,
        in_channels: int = 3,
        dropout: float = 0.0,
        widths: Sequence[int] = (64, 128, 256, 512),
        strides: Sequence[int] = (1, 2, 2, 2, 2),
        activation: Activation = PReLU,
        stride_first: bool = False,
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, stride=strides[0], padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.prelu = activation(widths[0])
        self.stages = [f"layer{number}" for number in range(1, len(depths) + 1)]
        width_in, side = widths[0], -(-image_size // strides[0])
        for name, depth, width, stride in zip(self.stages, depths, widths, strides[1:], strict=True):
            blocks = [Block(width_in, width, stride, activation, stride_first)]
            blocks += [Block(width, width, 1, activation) for _ in range(depth - 1)]
            setattr(self, name, nn.Sequential(*blocks))
            width_in, side = width, -(-side // stride)  # a padded 3x3 with stride 2 rounds up
        self.bn2 = nn.BatchNorm2d(width_in)
        self.dropout = Dropout(dropout)
        self.fc = nn.Linear(width_in * side * side, embedding_size)
        self.features = nn.BatchNorm1d(embedding_size)
        # The feature is normalised to unit length later; a learnt scale per axis would only distort it.
        self.features.weight.requires_grad_(False)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.1)

    def forward(self, image_B3HW: Tensor) -> Tensor:
        x = self.prelu(self.bn1(self.conv1(image_B3HW)))
        for name in self.stages:
            x = getattr(self, name)(x)
        x = self.dropout(torch.flatten(self.bn2(x), 1))
        with torch.autocast(x.device.type, enabled=False):
            return self.features(self.fc(x.to(self.fc.weight.dtype)))


def build(name: str, embedding_size: int, image_size: int, in_channels: int, dropout: float) -> IResNet:
    """Builds one of DEPTHS or SMALL."""
    if name in DEPTHS:
        return IResNet(DEPTHS[name], embedding_size, image_size, in_channels, dropout)
    # Channels last, on a CPU: the stem halves the image before the costly first stage, and ReLU takes half the time of
    # PReLU. At 40 pixels the last map is 5x5; halving it again costs accuracy, even with more blocks.
    depths, stride_first = SMALL[name]
    return IResNet(
        depths,
        embedding_size,
        image_size,
        in_channels,
        dropout,
        widths=(32, 64, 128),
        strides=(2, 1, 2, 2),
        activation=lambda width: nn.ReLU(inplace=True),
        stride_first=stride_first,
    )
