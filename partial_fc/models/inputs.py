"""Input contracts of networks: how a batch becomes the input. Saved with the model, so that all users agree."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class InputContract(Protocol):
    """The conversion of a loader's batch, on the device of the network, to its input: Pixels, Unchanged, among others.

    unit: the log's word for samples, "images" or "samples". facts: the contract in strings, as in model.safetensors and
    checkpoints. picture: one sample of a batch as a picture, (H, W, C), or None.
    """

    @property
    def unit(self) -> str: ...

    def __call__(self, data_B: Tensor, /) -> Tensor: ...

    def facts(self) -> dict[str, str]: ...

    def picture(self, data: Tensor, /) -> Tensor | None: ...


@dataclass(frozen=True)
class Unchanged:
    """Passes any transform's output (tokens, vectors) unchanged, but floating-point numbers in --precision's dtype.

    description: shape and meaning in words, "int64 (N, 16), numbers of words, 0 where a text is shorter".
    """

    description: str
    unit: str = "samples"

    def __call__(self, data_B: Tensor) -> Tensor:
        return data_B

    def facts(self) -> dict[str, str]:
        return {"input": self.description}

    def picture(self, data: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Pixels:
    """uint8 pixels -> float32 (pixel - mean) / std, with one number for all channels or one a channel.

    description: the same in words, for model.safetensors and for people. bgr: the network takes blue, green, red
    instead of the loader's red, green, blue; mean and std are in the network's order.
    """

    description: str
    mean: float | tuple[float, ...]
    std: float | tuple[float, ...]
    bgr: bool = False

    unit = "images"

    def __call__(self, pixel_B: Tensor) -> Tensor:
        """Converts uint8 (B, C, ...) to float32. Raises ValueError for another dtype, perhaps normalised already."""
        if pixel_B.dtype != torch.uint8:
            raise ValueError(f"images are {pixel_B.dtype}, expected torch.uint8 pixels, 0 to 255")
        values = (pixel_B.flip(1) if self.bgr else pixel_B).float()
        mean, std = (_per_channel(x, values) for x in (self.mean, self.std))
        # Without a mean nothing is subtracted: bit-identical to torchvision's ToTensor.
        return values / std if self.mean == 0.0 else (values - mean) / std

    def facts(self) -> dict[str, str]:
        """Returns the contract in strings, as in files of the network; `contract_of` reads it."""
        numbers = {"mean": self.mean, "std": self.std, "bgr": self.bgr}
        return {"input": self.description, **{name: json.dumps(value) for name, value in numbers.items()}}

    def picture(self, data: Tensor) -> Tensor:
        """Returns an image (C, H, W), or the middle frame of a clip (C, T, H, W), as (H, W, C)."""
        return (data[:, data.shape[1] // 2] if data.ndim == 4 else data).permute(1, 2, 0)


def _per_channel(x: float | tuple[float, ...], like: Tensor) -> Tensor | float:
    if isinstance(x, float):
        return x
    return torch.tensor(x, device=like.device).view(-1, *(1,) * (like.dim() - 2))


# arcface_torch's. (InsightFace's trainer of 2020 divides by 128.)
FACE = Pixels("float32 (N, 3, H, W), RGB, (pixel - 127.5) / 127.5", 127.5, 127.5)
MNIST = Pixels("float32 (N, 1, 28, 28), white on black, pixel / 255", 0.0, 255.0)
_IMAGENET = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
# torchvision's, for ResNets.
TORCHVISION = Pixels("float32 (N, 3, H, W), RGB, (pixel - mean) / std of ImageNet", *_IMAGENET)
# Of video networks.
CLIPS = Pixels("float32 (N, 3, T, H, W), RGB, (pixel - mean) / std of ImageNet", *_IMAGENET)


def contract_of(facts: Mapping[str, str]) -> Pixels | None:
    """Returns the contract in a file's strings; None if they have none. Raises ValueError for one that is
    not understood."""
    if not {"input", "mean", "std"} & facts.keys():
        return None
    try:
        mean, std = (_numbers(facts[name]) for name in ("mean", "std"))
        bgr = {"true": True, "false": False}[facts.get("bgr", "false")]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"its mean is {facts.get('mean')!r}, std {facts.get('std')!r}, bgr {facts.get('bgr')!r}; expected a number "
            "or one a channel, std above 0, and true or false"
        ) from error
    if not all(value > 0 for value in ([std] if isinstance(std, float) else std)):
        raise ValueError(f"its std is {facts['std']}; expected above 0")
    order = "BGR" if bgr else "RGB"
    return Pixels(facts.get("input") or f"float32, {order}, (pixel - {mean}) / {std}", mean, std, bgr)


def _numbers(text: str) -> float | tuple[float, ...]:
    """Parses JSON: a number or a list of some. Raises ValueError or TypeError for anything else."""
    value = json.loads(text)
    numbers = [float(number) for number in (value if isinstance(value, list) else [value])]
    if not numbers or not all(map(math.isfinite, numbers)):
        raise ValueError(text)
    return tuple(numbers) if isinstance(value, list) else numbers[0]
