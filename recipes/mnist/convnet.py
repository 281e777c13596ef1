"""The PyTorch tutorial's network for MNIST: two convolutions and a linear layer, 29,034 parameters.

Parameter names are those of the tutorial's two `nn.Sequential`, so that its weights load without a mapping:
layer1.0.weight (convolution), layer1.1.* (batch norm), layer2.0.*, layer2.1.*, fc.*.

B images, C classes.
"""

import torch
from torch import Tensor, nn

SIDE = 28  # pixels; required by the linear layer
NUM_CLASSES = 10


class ConvNet(nn.Module):
    """image_B1HW (float, 0 to 1, H = W = 28) -> logit_BC, in the dtype of its input (autocast's under autocast)."""

    def __init__(self, num_classes: int = NUM_CLASSES):
        super().__init__()
        self.layer1 = _layer(1, 16)
        self.layer2 = _layer(16, 32)
        self.fc = nn.Linear((SIDE // 4) ** 2 * 32, num_classes)

    def forward(self, image_B1HW: Tensor) -> Tensor:
        place_B = self.layer2(self.layer1(image_B1HW))
        # reshape, not view: channels-last images have another memory order.
        return self.fc(torch.reshape(place_B, (len(place_B), -1)))


def _layer(width_in: int, width: int) -> nn.Sequential:
    """Returns a convolution that keeps the size, and a pooling that halves it."""
    return nn.Sequential(
        nn.Conv2d(width_in, width, kernel_size=5, stride=1, padding=2),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=2, stride=2),
    )
