"""Apex's `amp_checkpoint.pt`, as its documentation (https://nvidia.github.io/apex/amp.html) tells users to write it:

    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}

amp's part is {"loss_scaler0": {"loss_scale": x, "unskipped": n}}, n being the updates since the scale last changed;
without loss scaling x is 1. The model's tensors are fp32 under every opt_level (here the masters). Models wrapped in
DistributedDataParallel have "module." before each name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from partial_fc.files import replacing
from partial_fc.foreign.state_dicts import check_parameter_state, is_state_dict, load_torch, parameter_states
from partial_fc.optim.backbone import in_layout_of

_PARTS = ("model", "optimizer", "amp")


@dataclass(frozen=True)
class ApexCheckpoint:
    """A file's contents: the model's tensors without "module."; torch's optimizer state dict; the scaler's state."""

    path: Path
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    loss_scale: float
    unskipped: int


def write(
    path: Path,
    model: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    loss_scale: float = 1.0,
    unskipped: int = 0,
) -> None:
    """Writes a file atomically. model: fp32 weights (with fp16-o2 the masters) and the buffers, by name. Raises
    ValueError for weights that are not fp32: Apex writes no others."""
    for name, t in model.items():
        if t.is_floating_point() and t.dtype != torch.float32:
            raise ValueError(f"{path}: {name} is {t.dtype}; Apex's files hold fp32 weights")
    content = {
        "model": {name: t.detach().cpu() for name, t in model.items()},
        "optimizer": optimizer.state_dict(),
        "amp": {"loss_scaler0": {"loss_scale": loss_scale, "unskipped": unskipped}},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        torch.save(content, partial)


def read(path: Path) -> ApexCheckpoint:
    """Reads a file. Raises ValueError, which names the file and the error, if the layout is not Apex's."""
    if not path.is_file():
        raise ValueError(f"{path} not found; expected a file that torch.save wrote, as Apex's documentation shows")
    content = load_torch(path)
    if not isinstance(content, dict) or not set(_PARTS) <= content.keys():
        got = f"the keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: expected Apex's three parts {', '.join(_PARTS)}; got {got}")
    model, optimizer = content["model"], content["optimizer"]
    if not model or not is_state_dict(model):
        raise ValueError(f"{path}: its model is no state dict (expected names and tensors)")
    model = dict(model)
    consume_prefix_in_state_dict_if_present(model, "module.")
    parameter_states(optimizer, path)  # raises for anything but an optimizer's, before loading
    return ApexCheckpoint(path, model, optimizer, *_scaler(path, content["amp"]))


def load_optimizer(checkpoint: ApexCheckpoint, optimizer: torch.optim.Optimizer) -> None:
    """Loads the file's buffers (momentum) by parameter order, since it has no names. Keeps this run's rates and
    coefficients. Raises ValueError if the parameters do not match."""
    path = checkpoint.path
    states = parameter_states(checkpoint.optimizer, path)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if len(states) != len(parameters):
        raise ValueError(
            f"{path}: its optimizer has {len(states)} parameters, this one {len(parameters)}: another model"
        )
    kept = _state_names(optimizer)
    kept_states = {}
    for number, (p, state) in enumerate(zip(parameters, states, strict=True)):
        if state.keys() - kept:
            raise ValueError(
                f"{path}: parameter {number} has {sorted(state)}, this optimizer keeps {sorted(kept)}: another "
                "optimizer"
            )
        check_parameter_state(state, p.shape, number, path)
        kept_states[number] = {
            name: in_layout_of(p, value) if isinstance(value, Tensor) and name != "step" else value
            for name, value in state.items()
        }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": kept_states})


def _state_names(optimizer: torch.optim.Optimizer) -> set[str]:
    """Returns the names of the optimizer's state per parameter, also before its first step."""
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if any(g["momentum"] for g in optimizer.param_groups) else set()
    if isinstance(optimizer, torch.optim.AdamW):
        return {"step", "exp_avg", "exp_avg_sq"}
    raise ValueError(f"what {type(optimizer).__name__} keeps of its steps is not known here; expected SGD or AdamW")


def _scaler(path: Path, amp: Any) -> tuple[float, int]:
    """Returns (loss scale, updates since it last changed)."""
    match amp:
        case {"loss_scaler0": {"loss_scale": int() | float() as loss_scale, "unskipped": int() as unskipped}} if (
            len(amp) == 1
        ):
            pass
        case _:
            of_torch = isinstance(amp, dict) and "growth_tracker" in amp
            whose = ", the state of torch's GradScaler, not Apex's" if of_torch else ""
            raise ValueError(
                f"{path}: its amp is {str(amp)[:200]}{whose}; expected "
                "{'loss_scaler0': {'loss_scale': x, 'unskipped': n}}, two numbers of the one loss that there is here"
            )
    if not (math.isfinite(loss_scale) and loss_scale > 0 and unskipped >= 0):
        raise ValueError(f"{path}: loss scale {loss_scale}, unskipped {unskipped}; expected above 0, and 0 or more")
    return float(loss_scale), unskipped
