"""Networks that are not built in: one of timm's (`timm:NAME`), or what a function makes (`FILE.py:FUNCTION`).

    def make(embedding_size: int, image_size: int) -> nn.Module: ...     images (N, 3, H, W) -> (N, embedding_size)

A module may state its input contract as `to_input` (inputs.Pixels); else it is that of the networks here, inputs.FACE.
"""

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partial_fc.errors import package
from partial_fc.files import import_file
from partial_fc.models.inputs import FACE, Pixels

TIMM = "timm:"
_TIMM_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, KeyError)  # of its networks, for wrong arguments


def is_encoder(name: str) -> bool:
    """Tells whether a name is `timm:NAME` or `FILE.py:FUNCTION`."""
    return name.startswith(TIMM) or ".py:" in name


def build(name: str, embedding_size: int, image_size: int, dropout: float = 0.0) -> nn.Module:
    """Builds an encoder with fresh weights; nothing is downloaded. Raises ValueError, before any training, if it is not
    there, cannot be built, or does not map such images to (N, embedding_size)."""
    if name.startswith(TIMM):
        module = _of_timm(name.removeprefix(TIMM), embedding_size, image_size, dropout)
    else:
        module = of_file("--network", name)(embedding_size=embedding_size, image_size=image_size)
        if not isinstance(module, nn.Module):
            raise ValueError(f"--network {name} returns a {type(module).__name__}; expected a torch.nn.Module")
    _check_output(module, name, embedding_size, image_size)
    return module


def input_of(module: nn.Module) -> Pixels:
    """Returns the input contract of what `build` made."""
    return getattr(module, "to_input", FACE)


def note(module: nn.Module, image_size: int) -> str:
    """Returns a note for the user if timm's network was published for another image size; else nothing."""
    cfg: Any = getattr(module, "pretrained_cfg", {})
    height, width = cfg.get("input_size", (3, image_size, image_size))[1:]
    if (height, width) == (image_size, image_size):
        return ""
    return f"published for {height} x {width} pixels, resized {cfg.get('interpolation')}, not {image_size}"


class OutputLinear(nn.Linear):
    """A linear layer that computes in fp32, under autocast and beside 16-bit weights: as IResNet's last."""

    KEEPS_FP32 = ("",)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


# ---- timm


def _of_timm(name: str, embedding_size: int, image_size: int, dropout: float) -> nn.Module:
    try:
        timm = package("timm", "--network timm:NAME", "timm")
    except RuntimeError as error:
        raise ValueError(
            f"--network timm:NAME: timm cannot be imported ({error}); take torch and torchvision from one index"
        ) from error
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), 3, 0.5) or timm.list_models(f"*{name}*")[:3]
        hint = f"; near ones: {', '.join(close)}" if close else ""
        raise ValueError(f"--network {TIMM}{name}: timm {timm.__version__} has no {name}{hint}")
    sizes: dict[str, Any] = {"num_classes": embedding_size, "drop_rate": dropout}
    try:
        try:
            module: Any = timm.create_model(name, img_size=image_size, **sizes)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            module = timm.create_model(name, **sizes)  # a convolutional network takes any size
    except _TIMM_ERRORS as error:
        raise ValueError(f"--network {TIMM}{name} with --image-size {image_size}: timm says: {error}") from error
    cfg = module.pretrained_cfg
    last = cfg.get("classifier")
    layer = module.get_submodule(last) if isinstance(last, str) else None
    if not isinstance(layer, nn.Linear):
        raise ValueError(
            f"--network {TIMM}{name}: its last layer is {last} ({type(layer).__name__}), expected one linear layer; "
            "FILE.py:FUNCTION may wrap the network"
        )
    if layer.in_features == embedding_size:
        module.reset_classifier(0)
    else:
        output = OutputLinear(layer.in_features, embedding_size)
        output.load_state_dict(layer.state_dict())
        module.set_submodule(last, output)
    mean, std = (_one_or_three(cfg[key]) for key in ("mean", "std"))
    module.to_input = Pixels(f"float32 (N, 3, H, W), RGB, (pixel - mean) / std of {TIMM}{name}", mean, std)
    return module


def _one_or_three(share: tuple[float, ...]) -> float | tuple[float, ...]:
    """Converts a mean or deviation of values in [0, 1] to pixels."""
    pixels = tuple(round(255 * value, 6) for value in share)
    return pixels[0] if len(set(pixels)) == 1 else pixels


# ---- a function in a file


def split(name: str) -> tuple[Path, str]:
    """Splits FILE.py:FUNCTION."""
    file, _, function = name.rpartition(":")
    return Path(file), function


def of_file(flag: str, name: str) -> Callable[..., Any]:
    """Runs the file of FILE.py:NAME and returns its function or class. Raises ValueError without one."""
    file, wanted = split(name)
    try:
        code = import_file(file, f"partial_fc{flag.replace('-', '_')}_{file.stem}")
    except (OSError, SyntaxError, ImportError) as error:
        raise ValueError(f"{flag} {name}: {file} cannot be run: {error}") from error
    make = getattr(code, wanted, None)
    if not callable(make):
        have = [key for key, value in vars(code).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{flag} {name}: {file} has no {wanted}; it has {', '.join(have) or 'none'}")
    return make


def _check_output(module: nn.Module, name: str, embedding_size: int, image_size: int) -> None:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = module.eval()(torch.zeros(2, 3, image_size, image_size))
    except _TIMM_ERRORS as error:
        raise ValueError(f"--network {name} does not take images of {image_size} pixels: {error}") from error
    finally:
        module.train()
    shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    if shape != (2, embedding_size):
        raise ValueError(
            f"--network {name}: for 2 images it returns {shape}; expected (2, {embedding_size}), by --embedding-size"
        )
