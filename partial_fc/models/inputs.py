"""What a network takes: how pixels become its input. Saved with the model, so that whoever uses it does the same."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class InputContract:
    """uint8 pixels -> float32 (pixel - mean) / std.

    description: the same in words, for model.safetensors and for people.
    """

    description: str
    mean: float
    std: float

    def __call__(self, pixel_B: Tensor) -> Tensor:
        """pixel_B: uint8 (B, C, ...) -> float32 of that shape. ValueError for another dtype: those pixels may be
        normalised already."""
        if pixel_B.dtype != torch.uint8:
            raise ValueError(f"images are {pixel_B.dtype}, expected torch.uint8 pixels, 0 to 255")
        values = pixel_B.float()
        # Without a mean nothing is subtracted: the bits are those of torchvision's ToTensor.
        return values / self.std if self.mean == 0.0 else (values - self.mean) / self.std


# As arcface_torch feeds its networks. (InsightFace's MXNet recipe divides by 128.)
FACE = InputContract("float32 (N, 3, H, W), RGB, (pixel - 127.5) / 127.5", 127.5, 127.5)
MNIST = InputContract("float32 (N, 1, 28, 28), white on black, pixel / 255", 0.0, 255.0)
