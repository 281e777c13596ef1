"""The precision of the backbone, and the loss scale of 16-bit gradients.

    fp32      as it says
    bf16      autocast: convolutions and products on bfloat16 numbers, parameters fp32
    fp16      autocast to float16, with a loss scale (O1, torch's AMP)
    fp16-o2   parameters are float16 themselves, but for batch norms and what the model keeps wide; the optimizer moves
              fp32 masters of them; no autocast, with a loss scale (O2)
    fp64      for checks

The head computes in fp32 (or fp64) in all modes. (Micikevicius et al., 2018, "Mixed Precision Training",
https://arxiv.org/abs/1710.03740.)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from partial_fc.comm import World
from partial_fc.machine import has_bf16
from partial_fc.models import keeps_fp32

Mode = Literal["fp32", "bf16", "fp16", "fp16-o2", "fp64"]


def choose(asked: Literal["auto"] | Mode, device: torch.device, world: World) -> Mode:
    """Returns the mode; auto: bf16 if the hardware of all ranks supports it, else fp32, by a collective."""
    if asked != "auto":
        return asked
    without = torch.tensor([not has_bf16(device)]).int()
    return "fp32" if world.all_reduce(without, "max", name="start/precision").item() else "bf16"


class Precision:
    """One of the modes, on a device. `scaler` is set in the modes with a loss scale."""

    def __init__(self, mode: Mode, device: torch.device):
        self.mode = mode
        self.device = device
        self.scaler = LossScaler() if mode in ("fp16", "fp16-o2") else None
        self.parameter_dtype = torch.float64 if mode == "fp64" else torch.float32
        self._autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)
        self._input_dtype = torch.float16 if mode == "fp16-o2" else self.parameter_dtype

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler else 1.0

    def prepare(self, module: nn.Module) -> tuple["Weights", str | None]:
        """Converts the module to this mode in place; returns its weights, and a note for the user."""
        note = None
        narrow = torch.float16 if self.mode == "fp16-o2" else self._autocast_dtype
        if narrow and self.device.type == "cpu" and _cpu_convolves(narrow):
            add_up_convolutions_in_fp32(module, _slow_backward)
        elif narrow and self.device.type == "cpu":
            add_up_convolutions_in_fp32(module)
            name = str(narrow).removeprefix("torch.")
            note = (
                f"convolutions in {name} are slow on this CPU: they round to {name} and compute in fp32, a GPU's "
                "results without its speed"
            )
        return Weights(module, halve=self.mode == "fp16-o2"), note

    def autocast(self) -> AbstractContextManager:
        """Returns the context of every forward of the module."""
        dtype = self._autocast_dtype or torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=self._autocast_dtype is not None)

    def as_input(self, data_B: Tensor) -> Tensor:
        """Converts normalised images, or vectors, to the module's dtype; integers (of words) stay."""
        return data_B.to(self._input_dtype) if data_B.is_floating_point() else data_B


@dataclass
class LossScaler:
    """The loss scale: a factor of the backbone's gradient while it is float16, so that small values do not vanish.

    It doubles after 2,000 updates without overflow, up to 2^24, and halves if a gradient overflows, in which case the
    update is skipped. (A dynamic loss scale with NVIDIA's constants.) Ranks must agree on overflow, or they diverge.
    """

    scale: float = 2.0**16
    clean_steps: int = 0  # updates since the last change

    GROWTH_INTERVAL = 2000
    LARGEST = 2.0**24
    TOO_SMALL = (
        "the gradient is not finite at loss scale 1, after one halving an update: it is not the scale. Usual causes: a "
        "learning rate that is too high (--lr, --warmup-steps), activations beyond what fp16 holds (try --precision "
        "bf16 or fp32), or damaged data"
    )

    def update(self, overflowed: bool) -> None:
        """Updates the scale. Raises FloatingPointError if halving cannot help any more."""
        if overflowed:
            if self.is_smallest:
                raise FloatingPointError(self.TOO_SMALL)
            self.scale, self.clean_steps = self.scale / 2, 0
            return
        self.clean_steps += 1
        if self.clean_steps == self.GROWTH_INTERVAL:
            self.scale, self.clean_steps = min(self.scale * 2, self.LARGEST), 0

    @property
    def is_smallest(self) -> bool:
        """Returns whether the scale is at most 1: then it does not cause an overflow."""
        return self.scale <= 1.0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "clean_steps": self.clean_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self.scale, self.clean_steps = float(state["scale"]), int(state["clean_steps"])


class Weights:
    """A module's parameters as the optimizer and checkpoints see them: fp32, by their names in the module.

    halve: the module computes with float16 copies, except for batch norms' and those in `models.keeps_fp32`.
    """

    def __init__(self, module: nn.Module, halve: bool = False):
        self.module = module
        self._masters: dict[str, nn.Parameter] = {}
        if halve:
            wide = {id(p) for layer in keeps_fp32(module) for p in layer.parameters(recurse=False)}
            for name, p in module.named_parameters():
                if id(p) not in wide:
                    self._masters[name] = nn.Parameter(p.detach().clone(), p.requires_grad)
                    p.data = p.data.half()
        self._own = dict(module.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in self._own.items():
            yield name, self._masters.get(name, p)

    def bind_gradients(self, gradient_of: Mapping[nn.Parameter, Tensor]) -> None:
        """Binds the fp32 gradient of every float16 parameter, once (GradientSync.gradient_of)."""
        for name, master in self._masters.items():
            if master.requires_grad:
                master.grad = gradient_of[self._own[name]]

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters, rounded, to the module, after a change."""
        for name, master in self._masters.items():
            self._own[name].copy_(master)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the module's state dict, with fp32 parameters."""
        return {**self.module.state_dict(), **{name: m.detach() for name, m in self._masters.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads what `state_dict` returned, in this mode or another."""
        self.module.load_state_dict(state)
        for name, master in self._masters.items():
            master.copy_(state[name])


def _cpu_convolves(dtype: torch.dtype) -> bool:
    """Returns whether the CPU trains convolutions in this dtype fast. If oneDNN lacks them, torch's own take ten times
    as long as in fp32. For float16 oneDNN has some on newer CPUs, but their backward does not use vector units: 80
    times the time of fp32 (64 images of 64 channels, 56 x 56 pixels, on a Xeon with AVX512-FP16)."""
    return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _slow_backward(layer: nn.Module) -> bool:
    """Returns whether oneDNN's bf16 backward of this convolution is slow: if a group has several channels (its weights'
    gradient: 29 ms an image, in fp32 2) or the convolution of single channels has a stride (its input's: 4 to 15 ms, in
    fp32 0.3). MobileFaceNet, 112 pixels, a Xeon with AMX."""
    if not isinstance(layer, nn.Conv2d | nn.Conv3d) or layer.groups == 1:
        return False
    return layer.in_channels > layer.groups or max(layer.stride) > 1


def add_up_convolutions_in_fp32(module: nn.Module, which: Callable[[nn.Module], bool] = lambda _layer: True) -> None:
    """Makes those of `which` that would run in a 16-bit dtype compute in fp32, on operands rounded to that dtype, and
    round the result, forward and backward, as matrix units of GPUs do. State-dict names stay."""
    for layer in module.modules():
        if which(layer):
            layer.__class__ = _WIDE.get(type(layer), type(layer))


class _Wide(nn.Module):
    """A mixin of torch's convolutions, which compute."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
        if dtype not in (torch.float16, torch.bfloat16):
            return super()._conv_forward(input, weight, bias)  # type: ignore[misc]
        with torch.autocast("cpu", enabled=False):
            x, w = input.to(dtype).float(), weight.to(dtype).float()
            b = None if bias is None else bias.to(dtype).float()
            return super()._conv_forward(x, w, b).to(dtype)  # type: ignore[misc]


class _WideConv2d(_Wide, nn.Conv2d): ...


class _WideConv3d(_Wide, nn.Conv3d): ...


_WIDE: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: _WideConv2d, nn.Conv3d: _WideConv3d}
