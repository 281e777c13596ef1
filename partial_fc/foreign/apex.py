"""Apex's `amp_checkpoint.pt`, as its documentation has users write it (https://nvidia.github.io/apex/amp.html):

    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}

amp's own part is {"loss_scaler0": {"loss_scale": x, "unskipped": n}}, n being the updates since the scale last
changed; without loss scaling x is 1. The model's tensors are fp32 under every opt_level: under O2 Apex widens its
float16 weights for the file; what is written here are the fp32 masters, of which those are the rounding. Models that
were wrapped in DistributedDataParallel have "module." before each name.

Files are read as tensors and plain values only (`partial_fc.foreign.torch_file`), so a foreign one cannot run code.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partial_fc.files import replacing
from partial_fc.foreign import torch_file

_PARTS = ("model", "optimizer", "amp")
_PREFIX = "module."
# What makes another optimiser of one that takes over a file's buffers.
_HYPERPARAMETERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")


@dataclass(frozen=True)
class ApexCheckpoint:
    """What a file holds: the model's tensors without "module.", 16-bit ones widened to fp32; torch's optimiser state
    dict as it is; the scaler's state."""

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
    """model: fp32 weights (with fp16-o2 the masters) and the buffers, by name.

    The file takes an old one's place at once. Raises ValueError for weights that are not fp32: Apex writes no others.
    """
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
    """Raises ValueError, which names the file and what is wrong, for one that does not have Apex's layout."""
    content = _load(path)
    if not isinstance(content, dict) or not set(_PARTS) <= content.keys():
        got = f"the keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path}: expected Apex's three parts {', '.join(_PARTS)}; got {got}")
    loss_scale, unskipped = _scaler(path, content["amp"])
    optimizer = content["optimizer"]
    if not _is_optimizer(optimizer):
        raise ValueError(f"{path}: its optimizer is no torch state dict (expected 'state' and 'param_groups')")
    return ApexCheckpoint(path, _model(path, content["model"]), optimizer, loss_scale, unskipped)


def _is_optimizer(value: Any) -> bool:
    """Buffers by name for each numbered parameter, and groups that list those numbers."""
    if not isinstance(value, dict) or not {"state", "param_groups"} <= value.keys():
        return False
    state, groups = value["state"], value["param_groups"]
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    of_parameters = all(isinstance(s, dict) and all(isinstance(name, str) for name in s) for s in state.values())
    lists = [group.get("params") if isinstance(group, dict) else None for group in groups]
    return of_parameters and all(isinstance(p, list) and all(type(n) is int for n in p) for p in lists)


def model_state(checkpoint: ApexCheckpoint, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors for a model whose own state dict is `state`, in its dtypes. Raises ValueError where names or
    shapes are others."""
    missing, extra = state.keys() - checkpoint.model.keys(), checkpoint.model.keys() - state.keys()
    if missing or extra:
        raise ValueError(
            f"{checkpoint.path} is of another model: it lacks {sorted(missing)[:3]} and has {sorted(extra)[:3]} besides"
        )
    for name, t in state.items():
        if checkpoint.model[name].shape != t.shape:
            raise ValueError(
                f"{checkpoint.path}: {name} has shape {tuple(checkpoint.model[name].shape)}, this model's "
                f"{tuple(t.shape)}"
            )
    return {name: checkpoint.model[name].to(t.dtype) for name, t in state.items()}


def load_optimizer(checkpoint: ApexCheckpoint, optimizer: torch.optim.Optimizer) -> list[str]:
    """Gives the optimizer the file's buffers (momentum), by the parameters' order, which is all that the file knows of
    them. Rates and coefficients stay this run's; returns a note for each that is another one in the file. Raises
    ValueError where the file's parameters are not this optimizer's."""
    groups, target_groups = checkpoint.optimizer["param_groups"], optimizer.param_groups
    numbers = [number for group in groups for number in group["params"]]
    parameters = [p for group in target_groups for p in group["params"]]
    if len(numbers) != len(parameters):
        raise ValueError(
            f"{checkpoint.path}: its optimizer has {len(numbers)} parameters, this one {len(parameters)}: another model"
        )
    known_names = _state_names(optimizer)
    buffers = [_buffers(checkpoint, number, p, known_names) for number, p in zip(numbers, parameters, strict=True)]
    for p, of_parameter in zip(parameters, buffers, strict=True):
        optimizer.state[p] = of_parameter
    return [
        f"{checkpoint.path} was written with {name} {groups[0][name]}; this run's {target_groups[0][name]} holds"
        for name in _HYPERPARAMETERS
        if isinstance(groups[0].get(name), (int, float)) and groups[0][name] != target_groups[0].get(name)
    ]


def _state_names(optimizer: torch.optim.Optimizer) -> set[str]:
    """The names of what the optimizer keeps for a parameter, also before its first step."""
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if any(g["momentum"] for g in optimizer.param_groups) else set()
    if isinstance(optimizer, torch.optim.AdamW):
        return {"step", "exp_avg", "exp_avg_sq"}
    raise ValueError(f"what {type(optimizer).__name__} keeps of its steps is not known here; expected SGD or AdamW")


def _buffers(checkpoint: ApexCheckpoint, number: int, p: Tensor, known_names: set[str]) -> dict[str, Any]:
    """The file's state of parameter `number`, as that of p."""
    given = {k: v for k, v in checkpoint.optimizer["state"].get(number, {}).items() if v is not None}
    if given and given.keys() - known_names:
        raise ValueError(
            f"{checkpoint.path}: parameter {number} has {sorted(given)}, this optimizer keeps {sorted(known_names)}: "
            "another optimizer"
        )
    for name, value in given.items():
        if name == "step":
            if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
                raise ValueError(f"{checkpoint.path}: step of parameter {number} is no number")
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != tuple(p.shape):
            raise ValueError(
                f"{checkpoint.path}: {name} of parameter {number} has shape {shape}, the parameter {tuple(p.shape)}: "
                "another model, or another order of its parameters"
            )
        given[name] = value.to(p.device, p.dtype, copy=True)
    return given


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} not found; expected a file that torch.save wrote, as Apex's documentation shows")
    return torch_file.load(path)


def _model(path: Path, model: Any) -> dict[str, Tensor]:
    if not isinstance(model, dict) or not model or not all(isinstance(t, Tensor) for t in model.values()):
        raise ValueError(f"{path}: its model is no state dict (expected names and tensors)")
    if not all(isinstance(name, str) for name in model):
        raise ValueError(f"{path}: its model has names that are no text")
    if all(name.startswith(_PREFIX) for name in model):
        model = {name.removeprefix(_PREFIX): t for name, t in model.items()}
    return {name: t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for name, t in model.items()}


def _scaler(path: Path, amp: Any) -> tuple[float, int]:
    expected = "expected {'loss_scaler0': {'loss_scale': x, 'unskipped': n}}"
    if isinstance(amp, dict) and "growth_tracker" in amp:
        raise ValueError(f"{path}: its amp is the state of torch's GradScaler, not Apex's; {expected}")
    if not isinstance(amp, dict) or list(amp) != ["loss_scaler0"]:
        got = sorted(map(str, amp)) if isinstance(amp, dict) else type(amp).__name__
        raise ValueError(f"{path}: its amp has {got}; {expected}, the scaler of the one loss that there is here")
    scaler = amp["loss_scaler0"]
    if not isinstance(scaler, dict) or not {"loss_scale", "unskipped"} <= scaler.keys():
        raise ValueError(f"{path}: its loss_scaler0 is {scaler!r}; {expected}")
    try:
        loss_scale, unskipped = float(scaler["loss_scale"]), int(scaler["unskipped"])
    except (TypeError, ValueError):
        raise ValueError(f"{path}: its loss_scaler0 is {scaler!r}; expected two numbers") from None
    if not (math.isfinite(loss_scale) and loss_scale > 0 and unskipped >= 0):
        raise ValueError(f"{path}: loss scale {loss_scale}, unskipped {unskipped}; expected above 0, and 0 or more")
    return loss_scale, unskipped
