"""ResNet and ResNeXt for ImageNet: Caffe2's, from resnet50_trainer and imagenet_trainer, and torchvision's.

Both have the stride of a bottleneck on its 3x3 (ResNet "v1.5"). State-dict names are torchvision's, so its published
weights load without a mapping; they expect RGB, Caffe2's networks BGR.

(He et al., 2015, https://arxiv.org/abs/1512.03385; Xie et al., 2016, https://arxiv.org/abs/1611.05431.)

B images, H = W pixels, C classes, D feature width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Details:
    """The differences between the frameworks' networks. bn_momentum: the share of the new batch in running statistics,
    as in torch; Caffe2's number is one minus that."""

    pool_padding: int
    bn_eps: float
    bn_momentum: float


TORCHVISION = Details(pool_padding=1, bn_eps=1e-5, bn_momentum=0.1)  # also Caffe2's last versions (imagenet_trainer)
CAFFE2 = Details(pool_padding=0, bn_eps=1e-3, bn_momentum=0.9)  # resnet50_trainer of 2017, v0.7 and v0.8


class BasicBlock(nn.Module):
    """3x3 (with the stride), 3x3, plus the input."""

    EXPANSION = 1

    def __init__(self, width_in: int, width: int, stride: int, groups: int, width_per_group: int, details: Details):
        super().__init__()
        if groups != 1 or width_per_group != 64:
            raise ValueError("networks of 18 and 34 layers have no groups: expected 1 group with a width of 64")
        self.conv1 = _conv(width_in, width, 3, stride)
        self.bn1 = _batch_norm(width, details)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = _batch_norm(width, details)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(width_in, width, stride, details)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride and the groups), 1x1 to four times `width`, plus the input."""

    EXPANSION = 4

    def __init__(self, width_in: int, width: int, stride: int, groups: int, width_per_group: int, details: Details):
        super().__init__()
        inner, width_out = width * width_per_group // 64 * groups, width * self.EXPANSION
        self.conv1 = _conv(width_in, inner, 1)
        self.bn1 = _batch_norm(inner, details)
        self.conv2 = _conv(inner, inner, 3, stride, groups)
        self.bn2 = _batch_norm(inner, details)
        self.conv3 = _conv(inner, width_out, 1)
        self.bn3 = _batch_norm(width_out, details)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(width_in, width_out, stride, details)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


NETWORKS: dict[str, tuple[type[BasicBlock | Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """Normalised image_B3HW (float), of any size -> logit_BC; with num_classes 0 the pooled feat_BD, for a Partial-FC
    head. feature_width: D, 512 with 18 and 34 layers, else 2048."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: tuple[int, ...],
        num_classes: int,
        groups: int,
        width_per_group: int,
        details: Details,
    ):
        super().__init__()
        self.conv1 = _conv(3, 64, 7, 2)
        self.bn1 = _batch_norm(64, details)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=details.pool_padding)
        self.stages = [f"layer{number}" for number in range(1, len(depths) + 1)]
        width_in = 64
        for stage, depth in enumerate(depths):
            width, blocks = 64 << stage, []
            for number in range(depth):
                stride = 2 if stage and not number else 1
                blocks.append(block(width_in, width, stride, groups, width_per_group, details))
                width_in = width * block.EXPANSION
            setattr(self, self.stages[stage], nn.Sequential(*blocks))
        self.feature_width = width_in
        self.fc = nn.Linear(width_in, num_classes) if num_classes else nn.Identity()
        self._initialize()

    def _initialize(self) -> None:
        """Sets Caffe2's start values: He-normal by the fan out, as in torchvision; the last layer uniform within sqrt(3
        / inputs), bias 0. (torchvision keeps torch's 1 / sqrt(inputs) for both.)"""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(self.fc, nn.Linear):
            bound = math.sqrt(3 / self.fc.in_features)
            nn.init.uniform_(self.fc.weight, -bound, bound)
            nn.init.zeros_(self.fc.bias)

    def forward(self, image_B3HW: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(image_B3HW))))
        for name in self.stages:
            x = getattr(self, name)(x)
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


def build(
    name: str, num_classes: int = 1000, groups: int = 1, width_per_group: int = 64, details: Details = TORCHVISION
) -> ResNet:
    """Builds a fresh network by torchvision's name, with weights from torch's global generator.

    name: one of NETWORKS. groups, width_per_group: ResNeXt's, such as 32 and 4 for 50 layers or 32 and 8 for 101.
    num_classes 0: features instead of logits. Raises ValueError for invalid values.
    """
    if name not in NETWORKS:
        raise ValueError(f"unknown network {name!r}, expected one of {', '.join(NETWORKS)}")
    if num_classes < 0 or min(groups, width_per_group) < 1:
        raise ValueError(
            f"classes {num_classes}, groups {groups}, width per group {width_per_group}: expected 0 or more, and 1 or "
            "more"
        )
    block, depths = NETWORKS[name]
    return ResNet(block, depths, num_classes, groups, width_per_group, details)


def _conv(width_in: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width_in, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False)


def _batch_norm(width: int, details: Details) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=details.bn_eps, momentum=details.bn_momentum)


def _downsample(width_in: int, width: int, stride: int, details: Details) -> nn.Sequential | None:
    """Returns a projection of the input if its shape does not match the sum."""
    if stride == 1 and width_in == width:
        return None
    return nn.Sequential(_conv(width_in, width, 1, stride), _batch_norm(width, details))
