"""SlowFast networks for video (Feichtenhofer et al., 2018, https://arxiv.org/abs/1812.03982), as in GluonCV.

Two ResNets with 3D convolutions process the same clip: the slow one few frames with many channels, the fast one many
frames with an eighth of the channels. After the stem and the first three stages the fast maps, strided in time to the
slow frame count, are concatenated to the slow ones. Both are averaged at the end.

State-dict names are those of GluonCV's blocks (fast_res2.0.conv1), so its published parameters load by name.

B clips, T frames (fast ones first, then slow ones), H = W pixels, C classes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

_EXPANSION = 4  # of a bottleneck
_FAST_SHARE = 8  # ratio of slow to fast channels (1 / the paper's beta)
_FUSED = 2  # channels of a lateral connection, as a multiple of the fast ones
_FIRST_NORMS = ("fast_bn1", "slow_bn1")
_STAGES = ("res2", "res3", "res4", "res5")
_BN_EPS, _BN_MOMENTUM, _DROPOUT, _FC_STD = 1e-5, 0.1, 0.5, 0.01


@dataclass(frozen=True)
class Shape:
    """The hyperparameters of a SlowFast network. A clip of 64 consecutive frames gives slow_frames frames, 64 /
    slow_frames apart, and 32 for the fast network."""

    depths: tuple[int, int, int, int]
    slow_frames: int
    lateral_kernel: int  # frames
    fast_frames: int = 32

    @property
    def alpha(self) -> int:
        """The number of fast frames per slow frame."""
        return self.fast_frames // self.slow_frames

    @property
    def num_frames(self) -> int:
        """T of an input."""
        return self.fast_frames + self.slow_frames


_DEPTHS_50, _DEPTHS_101 = (3, 4, 6, 3), (3, 4, 23, 3)
SHAPES = {
    "slowfast_4x16_resnet50_kinetics400": Shape(_DEPTHS_50, 4, 5),
    "slowfast_8x8_resnet50_kinetics400": Shape(_DEPTHS_50, 8, 7),
    "slowfast_4x16_resnet101_kinetics400": Shape(_DEPTHS_101, 4, 5),
    "slowfast_8x8_resnet101_kinetics400": Shape(_DEPTHS_101, 8, 7),
    "slowfast_4x16_resnet50_custom": Shape(_DEPTHS_50, 4, 5),  # GluonCV's name for other class counts
}


class Bottleneck(nn.Module):
    """1x1x1 or 3x1x1 (in time), 1x3x3 with the stride, 1x1x1 to four times `width`, plus the input."""

    def __init__(self, width_in: int, width: int, stride: int, time_kernel: int):
        super().__init__()
        width_out = width * _EXPANSION
        self.conv1 = _conv(width_in, width, (time_kernel, 1, 1))
        self.bn1 = _batch_norm(width)
        self.conv2 = _conv(width, width, (1, 3, 3), (1, stride, stride))
        self.bn2 = _batch_norm(width)
        self.conv3 = _conv(width, width_out, (1, 1, 1))
        self.bn3 = _batch_norm(width_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or width_in != width_out:
            shortcut = _conv(width_in, width_out, (1, 1, 1), (1, stride, stride))
            self.downsample = nn.Sequential(shortcut, _batch_norm(width_out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class SlowFast(nn.Module):
    """Normalised clip_B3THW (float), H = W of at least 32 -> logit_BC."""

    def __init__(self, shape: Shape, num_classes: int, width: int, dropout: float):
        super().__init__()
        self.shape = shape
        self.fixed_statistics = False  # see freeze_batch_norms
        slow, fast = width, width // _FAST_SHARE
        self.fast_conv1 = _conv(3, fast, (5, 7, 7), (1, 2, 2))
        self.fast_bn1 = _batch_norm(fast)
        self.slow_conv1 = _conv(3, slow, (1, 7, 7), (1, 2, 2))
        self.slow_bn1 = _batch_norm(slow)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1))
        fast_in, slow_in = fast, slow
        for number, stage in enumerate(_STAGES):
            stride, depth = 1 if number == 0 else 2, shape.depths[number]
            before = _STAGES[number - 1] if number else "p1"  # input of the lateral connection
            # Connects the fast network to the slow one, strided in time to its number of frames.
            conv = _conv(fast_in, fast_in * _FUSED, (shape.lateral_kernel, 1, 1), (shape.alpha, 1, 1))
            lateral = nn.Sequential(conv, _batch_norm(fast_in * _FUSED), nn.ReLU(inplace=True))
            setattr(self, f"lateral_{before}", lateral)
            setattr(self, f"fast_{stage}", _stage(fast_in, fast << number, depth, stride, 3))
            time_kernel = 3 if number >= 2 else 1  # the slow network convolves in time from res4 on
            slow_in += fast_in * _FUSED
            setattr(self, f"slow_{stage}", _stage(slow_in, slow << number, depth, stride, time_kernel))
            fast_in, slow_in = (fast << number) * _EXPANSION, (slow << number) * _EXPANSION
        self.dp = nn.Dropout(dropout)
        self.fc = nn.Linear(slow_in + fast_in, num_classes)
        self._initialize()

    def _initialize(self) -> None:
        """Sets GluonCV's start values: MXNet's MSRAPrelu, a last batch norm of 0 in each block, a normal last layer."""
        for module in self.modules():
            if isinstance(module, nn.Conv3d):
                fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(module.weight)
                nn.init.normal_(module.weight, std=(2 / (1 + 0.25**2) / ((fan_in + fan_out) / 2)) ** 0.5)
            if isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)
        nn.init.normal_(self.fc.weight, std=_FC_STD)
        nn.init.zeros_(self.fc.bias)

    def freeze_batch_norms(self, how: Literal["partial", "scales"]) -> None:
        """Freezes as GluonCV's partial_bn: all but the first of each network normalise with running statistics, also in
        training; or as its bn_frozen: scales and shifts are not trained."""
        if how == "partial":
            self.fixed_statistics = True
            return
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.requires_grad_(requires_grad=False)

    def train(self, mode: bool = True) -> "SlowFast":
        super().train(mode)
        if self.fixed_statistics:
            for name, module in self.named_modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and name not in _FIRST_NORMS:
                    module.eval()
        return self

    def forward(self, clip_B3THW: Tensor) -> Tensor:
        if clip_B3THW.shape[2] != self.shape.num_frames:
            raise ValueError(
                f"the clips have {clip_B3THW.shape[2]} frames; expected {self.shape.fast_frames} for the fast network "
                f"and then {self.shape.slow_frames} for the slow one"
            )
        # Loaders give channels-last pixels; with another weight order torch would copy maps back and forth.
        if not self.fast_conv1.weight.is_contiguous(memory_format=torch.channels_last_3d):
            clip_B3THW = clip_B3THW.contiguous()
        fast, slow = clip_B3THW.split((self.shape.fast_frames, self.shape.slow_frames), dim=2)
        fast = self.maxpool(self.relu(self.fast_bn1(self.fast_conv1(fast))))
        slow = self.maxpool(self.relu(self.slow_bn1(self.slow_conv1(slow))))
        for before, stage in zip(("p1", *_STAGES), _STAGES, strict=False):
            slow = torch.cat((slow, getattr(self, f"lateral_{before}")(fast)), dim=1)
            slow = getattr(self, f"slow_{stage}")(slow)
            fast = getattr(self, f"fast_{stage}")(fast)
        return self.fc(self.dp(torch.cat([x.mean((2, 3, 4)) for x in (slow, fast)], dim=1)))


def build(name: str, num_classes: int = 400, width: int = 64, dropout: float = _DROPOUT) -> SlowFast:
    """Builds a fresh network by GluonCV's name (`SHAPES`), with weights from torch's global generator. width: channels
    of the slow stem, a multiple of 8. Raises ValueError for invalid values."""
    if name not in SHAPES:
        raise ValueError(f"unknown network {name!r}, expected one of {', '.join(SHAPES)}")
    if width < _FAST_SHARE or width % _FAST_SHARE or num_classes < 1 or not 0 <= dropout < 1:
        raise ValueError(
            f"width {width}, classes {num_classes}, dropout {dropout}: expected a multiple of {_FAST_SHARE}, 1 or "
            "more, and from 0 to below 1"
        )
    return SlowFast(SHAPES[name], num_classes, width, dropout)


def _stage(width_in: int, width: int, depth: int, stride: int, time_kernel: int) -> nn.Sequential:
    blocks = [Bottleneck(width_in, width, stride, time_kernel)]
    blocks += [Bottleneck(width * _EXPANSION, width, 1, time_kernel) for _ in range(depth - 1)]
    return nn.Sequential(*blocks)


def _conv(
    width_in: int, width: int, kernel: tuple[int, int, int], stride: tuple[int, int, int] = (1, 1, 1)
) -> nn.Conv3d:
    padding = tuple(k // 2 for k in kernel)
    return nn.Conv3d(width_in, width, kernel, stride, padding, bias=False)  # type: ignore[arg-type]


def _batch_norm(width: int) -> nn.BatchNorm3d:
    return nn.BatchNorm3d(width, eps=_BN_EPS, momentum=_BN_MOMENTUM)
