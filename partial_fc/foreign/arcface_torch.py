"""Reads the files of arcface_torch (InsightFace's PyTorch trainer) that hold class centres, in all its versions:

    checkpoint_gpu_R.pt              partial_fc_v2.py: backbone, rank R's centres, the optimizer of both
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
class RankCentres:
    """The centres of one rank. state: the optimizer's by our names, (rows, D), or (rows, 1) for num_steps."""

    centre_LD: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    # What the momentum is to be divided by.
    momentum_unit: float = 1.0
    notes: list[str] = field(default_factory=list)


def from_checkpoint(path: Path) -> RankCentres:
    """Reads the centres of a checkpoint_gpu_R.pt."""
    checkpoint = torch_file.load(path)
    if not isinstance(checkpoint, Mapping) or "state_dict_softmax_fc" not in checkpoint:
        raise ValueError(f"{path} holds {_kind(checkpoint)}; expected a checkpoint with state_dict_softmax_fc")
    centres = RankCentres(_weight(checkpoint["state_dict_softmax_fc"], path))
    optimizer = checkpoint.get("state_optimizer")
    if optimizer:
        # The centres are the last parameter of the last group, as its trainer says they must be.
        for name, value in state_of(optimizer, _numbers(optimizer, path)[-1], path).items():
            _add_state(centres, _STATES.get(name), value)
    return centres


def from_weights(path: Path, momentum: Path | None) -> RankCentres:
    """Reads the centres of a softmax_fc_gpu_R.pt, or a rank_R_softmax_weight.pt with its momentum."""
    content = torch_file.load(path)
    centres = RankCentres(_matrix(content, path) if isinstance(content, Tensor) else _weight(content, path))
    mom = content.get("weight_mom") if isinstance(content, Mapping) else None
    if momentum:
        mom = torch_file.load(momentum)
    if mom is not None:
        centres.state["momentum"] = _matrix(mom, momentum or path)
        if centres.state["momentum"].shape != centres.centre_LD.shape:
            raise ValueError(
                f"{momentum or path} has momentum of shape {tuple(mom.shape)}; the centres in {path} have "
                f"{tuple(centres.centre_LD.shape)}"
            )
    return centres


def backbone_of(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, int]]:
    """Reads a checkpoint_gpu_R.pt: (state dict of the backbone, the optimizer's, {"epoch", "global_step"} as far as
    they are there)."""
    checkpoint = torch_file.load(path)
    weights = checkpoint.get("state_dict_backbone") if isinstance(checkpoint, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(t, Tensor) for t in weights.values()):
        raise ValueError(f"{path} has no state_dict_backbone of tensors")
    facts = {key: checkpoint[key] for key in ("epoch", "global_step") if isinstance(checkpoint.get(key), int)}
    return dict(weights), dict(checkpoint.get("state_optimizer") or {}), facts


def named_state(
    optimizer: dict[str, Any], weights: dict[str, Tensor], parameters: set[str], path: Path
) -> dict[str, Tensor]:
    """Names the backbone's part of a state_optimizer, as '<parameter>/<state>'. The n-th parameter is the n-th of the
    state dict that is one."""
    if not optimizer:
        return {}
    state = {}
    numbers = _numbers(optimizer, path)
    for name, number in zip((name for name in weights if name in parameters), numbers, strict=False):
        for key, value in state_of(optimizer, number, path).items():
            tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
            if key != "step" and tensor.shape != weights[name].shape:
                raise ValueError(
                    f"{path}: {key} of parameter {number} has shape {tuple(tensor.shape)}; expected that of {name}, "
                    f"{tuple(weights[name].shape)}"
                )
            state[f"{name}/{key}"] = tensor
    return state


def _numbers(optimizer: Any, path: Path) -> list[int]:
    """The numbers of all parameters, in order."""
    try:
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: state_optimizer is no optimizer's state dict: it lacks {error}") from error
    if not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"{path}: state_optimizer's params are not all numbers: {str(numbers)[:200]}")
    return numbers


def state_of(optimizer: dict[str, Any], number: int, path: Path) -> dict[str, Any]:
    """The tensors and numbers of one parameter, by torch's names."""
    state = optimizer.get("state", {}).get(number, {})
    if not isinstance(state, Mapping):
        raise ValueError(f"{path}: state_optimizer has {type(state).__name__} for parameter {number}")
    return {key: value for key, value in state.items() if isinstance(value, Tensor | int | float)}


def _add_state(centres: RankCentres, name: str | None, value: Any) -> None:
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


def _weight(content: Any, path: Path) -> Tensor:
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds {_kind(content)}; expected a state dict with the centres as weight")
    for name in ("weight", "weight_activated"):
        if isinstance(content.get(name), Tensor) and content[name].numel():
            return _matrix(content[name], path)
    raise ValueError(f"{path} holds {_kind(content)}; expected a state dict with the centres as weight")


def _matrix(content: Any, path: Path) -> Tensor:
    if not isinstance(content, Tensor) or content.dim() != 2 or not content.is_floating_point():
        raise ValueError(f"{path} holds {_kind(content)}; expected centres, floating (classes, D)")
    return content


def _kind(content: Any) -> str:
    if isinstance(content, Tensor):
        return f"{content.dtype} {tuple(content.shape)}"
    return ", ".join(map(str, list(content)[:8])) if isinstance(content, Mapping) else type(content).__name__
