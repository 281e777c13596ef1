"""Reads the files of arcface_torch (InsightFace's PyTorch trainer) that hold class centres, in all its versions:

    checkpoint_gpu_R.pt              partial_fc_v2.py: backbone, rank R's centres, the optimiser of both
    softmax_fc_gpu_R.pt              between the two: rank R's centres
    rank_R_softmax_weight.pt, rank_R_softmax_weight_mom.pt
                                     partial_fc.py, the first: rank R's centres, and their momentum

No code of a file is run (torch_file.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partial_fc.foreign import torch_file

_STATES = {  # torch's name -> ours
    "momentum_buffer": "momentum",
    "exp_avg": "first_moment",
    "exp_avg_sq": "second_moment",
    "step": "num_steps",
}


@dataclass
class Centres:
    """One rank's. state: by our names, (rows, D), or (rows, 1) for num_steps."""

    centre_LD: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    momentum_unit: float = 1.0  # what the momentum is to be divided by
    notes: list[str] = field(default_factory=list)


def from_checkpoint(path: Path) -> Centres:
    """Of a checkpoint_gpu_R.pt."""
    checkpoint = torch_file.load(path)
    if not isinstance(checkpoint, Mapping) or "state_dict_softmax_fc" not in checkpoint:
        raise ValueError(f"{path} holds {_kind(checkpoint)}; expected a checkpoint with state_dict_softmax_fc")
    centres = Centres(_weight(checkpoint["state_dict_softmax_fc"], path))
    optimizer = checkpoint.get("state_optimizer")
    if optimizer:
        # The centres are the last parameter of the last group, as its trainer says they must be.
        found = state_of(optimizer, _numbers(optimizer, path)[-1], path)
        for name, value in found.items():
            _take_state(centres, _STATES.get(name), value)
    return centres


def from_weights(path: Path, momentum: Path | None) -> Centres:
    """Of a softmax_fc_gpu_R.pt, or a rank_R_softmax_weight.pt with its momentum."""
    found = torch_file.load(path)
    centres = Centres(_matrix(found, path) if isinstance(found, Tensor) else _weight(found, path))
    mom = torch_file.load(momentum) if momentum else found.get("weight_mom") if isinstance(found, Mapping) else None
    if mom is not None:
        centres.state["momentum"] = _matrix(mom, momentum or path)
        if centres.state["momentum"].shape != centres.centre_LD.shape:
            raise ValueError(
                f"{momentum or path} has momentum of shape {tuple(mom.shape)}; the centres in {path} have "
                f"{tuple(centres.centre_LD.shape)}"
            )
    return centres


def backbone_of(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, int]]:
    """(state dict of the backbone, the optimiser's, {"epoch", "global_step"} as far as they are there) of a
    checkpoint_gpu_R.pt."""
    checkpoint = torch_file.load(path)
    weights = checkpoint.get("state_dict_backbone") if isinstance(checkpoint, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(t, Tensor) for t in weights.values()):
        raise ValueError(f"{path} has no state_dict_backbone of tensors")
    facts = {key: checkpoint[key] for key in ("epoch", "global_step") if isinstance(checkpoint.get(key), int)}
    return dict(weights), dict(checkpoint.get("state_optimizer") or {}), facts


def named_state(
    optimizer: dict[str, Any], weights: dict[str, Tensor], parameters: set[str], path: Path
) -> dict[str, Tensor]:
    """The backbone's part of a state_optimizer, as '<parameter>/<state>'. The n-th parameter is the n-th of the state
    dict that is one."""
    if not optimizer:
        return {}
    found = {}
    numbers = _numbers(optimizer, path)
    for name, number in zip((name for name in weights if name in parameters), numbers, strict=False):
        for key, value in state_of(optimizer, number, path).items():
            tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
            if key != "step" and tensor.shape != weights[name].shape:
                raise ValueError(
                    f"{path}: {key} of parameter {number} has shape {tuple(tensor.shape)}; expected that of {name}, "
                    f"{tuple(weights[name].shape)}"
                )
            found[f"{name}/{key}"] = tensor
    return found


def _numbers(optimizer: Any, path: Path) -> list[int]:
    """Of all parameters, in order."""
    try:
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: state_optimizer is no optimiser's state dict: it lacks {error}") from error
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"{path}: state_optimizer's params are not all numbers: {str(numbers)[:200]}")
    return numbers


def state_of(optimizer: dict[str, Any], number: int, path: Path) -> dict[str, Any]:
    """Of one parameter: its tensors and numbers by torch's names."""
    found = optimizer.get("state", {}).get(number, {})
    if not isinstance(found, Mapping):
        raise ValueError(f"{path}: state_optimizer has {type(found).__name__} for parameter {number}")
    return {key: value for key, value in found.items() if isinstance(value, Tensor | int | float)}


def _take_state(centres: Centres, name: str | None, value: Any) -> None:
    if name is None:
        return
    rows = len(centres.centre_LD)
    if name == "num_steps":
        centres.state[name] = torch.full((rows, 1), float(value))
    elif value.shape == centres.centre_LD.shape:
        centres.state[name] = value
    else:  # versions that sampled a parameter of its own
        centres.notes.append(
            f"{name} is of {len(value)} sampled rows out of {rows}, and which they are is not said: it starts anew"
        )


def _weight(found: Any, path: Path) -> Tensor:
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds {_kind(found)}; expected a state dict with the centres as weight")
    for name in ("weight", "weight_activated"):
        if isinstance(found.get(name), Tensor) and found[name].numel():
            return _matrix(found[name], path)
    raise ValueError(f"{path} holds {_kind(found)}; expected a state dict with the centres as weight")


def _matrix(found: Any, path: Path) -> Tensor:
    if not isinstance(found, Tensor) or found.dim() != 2 or not found.is_floating_point():
        raise ValueError(f"{path} holds {_kind(found)}; expected centres, floating (classes, D)")
    return found


def _kind(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"{found.dtype} {tuple(found.shape)}"
    return ", ".join(map(str, list(found)[:8])) if isinstance(found, Mapping) else type(found).__name__
