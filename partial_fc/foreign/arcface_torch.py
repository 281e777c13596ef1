"""Reader of class centres in files of arcface_torch (InsightFace's PyTorch trainer), in all its versions:

    checkpoint_gpu_R.pt              partial_fc_v2.py: backbone, rank R's centres, the optimizer of both
    softmax_fc_gpu_R.pt              between the two: rank R's centres
    rank_R_softmax_weight.pt, rank_R_softmax_weight_mom.pt
                                     partial_fc.py, the first: rank R's centres, and their momentum

No code in a file is executed (state_dicts.py).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partial_fc.foreign.state_dicts import (
    check_parameter_state,
    is_state_dict,
    load_torch,
    parameter_states,
    without_prefix,
)

_STATES = {"momentum_buffer": "momentum", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}  # torch's, ours


@dataclass
class RankCentres:
    """The centres of one rank. state: the optimizer's by our names, (rows, D), or (rows, 1) for num_steps."""

    centre_LD: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_momentum(self, mom_LD: Tensor, path: Path) -> None:
        """Adds the momentum; path: its file, for messages."""
        if mom_LD.shape != self.centre_LD.shape:
            raise ValueError(
                f"{path} has momentum of shape {tuple(mom_LD.shape)}; its centres have {tuple(self.centre_LD.shape)}"
            )
        self.state["momentum"] = mom_LD


def from_checkpoint(path: Path) -> RankCentres:
    """Reads the centres of a checkpoint_gpu_R.pt."""
    checkpoint, states = _checkpoint(path, "state_dict_softmax_fc")
    centres = RankCentres(_centres(checkpoint["state_dict_softmax_fc"], path))
    # The centres are the last parameter of the last group, as its trainer requires.
    state = states[-1] if states else {}
    shape = centres.centre_LD.shape
    if "step" in state:
        check_parameter_state({"step": state["step"]}, shape, len(states) - 1, path)
        centres.state["num_steps"] = torch.full((len(centres.centre_LD), 1), float(state["step"]))
    for name, ours in _STATES.items():
        value = state.get(name)
        if isinstance(value, Tensor) and value.shape == shape:
            centres.state[ours] = value
        elif isinstance(value, Tensor):  # versions with a separate parameter of sampled centres
            centres.notes.append(
                f"{ours} has shape {tuple(value.shape)}, the centres {tuple(shape)}: it belongs to sampled rows, and "
                "the file does not say which: it starts from zero"
            )
    return centres


def from_weights(path: Path, momentum: Path | None) -> RankCentres:
    """Reads the centres of a softmax_fc_gpu_R.pt, or a rank_R_softmax_weight.pt with its momentum."""
    content = load_torch(path)
    centres = RankCentres(_centres(content, path))
    if momentum:
        centres.add_momentum(_matrix(load_torch(momentum), momentum), momentum)
    elif isinstance(content, Mapping) and content.get("weight_mom") is not None:
        centres.add_momentum(_matrix(content["weight_mom"], path), path)
    return centres


def backbone_of(path: Path, parameters: Collection[str]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    """Reads a checkpoint_gpu_R.pt: (state dict of the backbone, its optimizer state as '<parameter>/<state>', {"epoch",
    "global_step"} if present).

    parameters: the names in the state dict that are parameters; the n-th of them is the optimizer's n-th.
    """
    checkpoint, states = _checkpoint(path, "state_dict_backbone")
    if not is_state_dict(checkpoint["state_dict_backbone"]):
        raise ValueError(f"{path}: its state_dict_backbone is no dictionary of tensors")
    weights = without_prefix(checkpoint["state_dict_backbone"])
    names = [name for name in weights if name in parameters]
    named = {}
    for number, (name, state) in enumerate(zip(names, states, strict=False)):
        check_parameter_state(state, weights[name].shape, number, path)
        for key, value in state.items():
            named[f"{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(float(value))
    facts = {key: checkpoint[key] for key in ("epoch", "global_step") if isinstance(checkpoint.get(key), int)}
    return weights, named, facts


def _checkpoint(path: Path, part: str) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """Reads (a checkpoint_gpu_R.pt that has this part, its optimizer's state of each parameter)."""
    checkpoint = load_torch(path)
    if not isinstance(checkpoint, Mapping) or part not in checkpoint:
        raise ValueError(f"{path} holds {_kind(checkpoint)}; expected a checkpoint with {part}")
    optimizer = checkpoint.get("state_optimizer")
    return checkpoint, parameter_states(optimizer, path) if optimizer else []


def _centres(content: Any, path: Path) -> Tensor:
    """Returns the centres, given as a tensor or in a state dict."""
    if isinstance(content, Mapping):
        weights = (content.get(name) for name in ("weight", "weight_activated"))
        content = next((t for t in weights if isinstance(t, Tensor) and t.numel()), content)
    return _matrix(content, path)


def _matrix(content: Any, path: Path) -> Tensor:
    if not isinstance(content, Tensor) or content.dim() != 2 or not content.is_floating_point():
        raise ValueError(f"{path} holds {_kind(content)}; expected centres, floating (classes, D)")
    return content


def _kind(content: Any) -> str:
    if isinstance(content, Tensor):
        return f"{content.dtype} {tuple(content.shape)}"
    return ", ".join(map(str, list(content)[:8])) if isinstance(content, Mapping) else type(content).__name__
