"""Validation of other programs' state dicts of torch modules and optimizers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

from partial_fc.printable import some

# torch's additions to names of wrapped modules, at any depth: torch.compile, FSDP, activation checkpointing.
_WRAPPED = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# Common attribute names of a network; `module` is DistributedDataParallel's.
_HOLDERS = ("module", "model", "backbone", "net", "network", "encoder")


def is_state_dict(value: Any) -> TypeGuard[dict[str, Tensor]]:
    """Tells whether a value is a dictionary of tensors by name."""
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in value.items())


def without_prefix(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights under the network's own names, if saved from a module that wraps or holds it:
    "module._orig_mod.conv1.weight", "model.backbone.conv1.weight". Drops that module's other parts, such as a head; the
    network is the part with the most tensors."""
    found = dict(weights)
    for wrapped in _WRAPPED:
        renamed = {name.replace(wrapped, ""): t for name, t in found.items()}
        found = renamed if len(renamed) == len(found) else found
    while found:
        holder, count = Counter(name.partition(".")[0] for name in found).most_common(1)[0]
        if holder not in _HOLDERS or 2 * count <= len(found):
            break
        found = {name.partition(".")[2]: t for name, t in found.items() if name.startswith(f"{holder}.")}
    return found


def check_fits(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path, model: str) -> None:
    """Checks that weights have the names and shapes of a model's state dict. Raises ValueError, with what is missing,
    unexpected or of another shape."""
    if problems := misfits(weights, expected):
        raise ValueError(
            f"{path} does not fit this {model}: {problems}. Is it the same network, embedding size and image size?"
        )


def misfits(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Lists what is missing, unexpected or of another shape or kind, up to eight names each; empty if all match."""
    reshaped = [
        f"{name} is {_kind(weights[name])}, expected {_kind(t)}"
        for name, t in expected.items()
        if name in weights and _kind(weights[name]) != _kind(t)
    ]
    problems = {
        "missing": [name for name in expected if name not in weights],
        "unexpected": [name for name in weights if name not in expected],
        "of another shape or kind": reshaped,
    }
    return "; ".join(f"{len(names)} {what}: {some(names)}" for what, names in problems.items() if names)


def fitting(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights that match a name, shape and kind of a model's state dict."""
    return {name: t for name, t in weights.items() if name in expected and _kind(t) == _kind(expected[name])}


def parameter_states(optimizer: Any, path: Path) -> list[dict[str, Any]]:
    """Returns an optimizer state dict's entries per parameter, in order. Raises ValueError for anything else."""
    try:
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        states = [dict(optimizer["state"].get(number, {})) for number in numbers]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: its optimizer is no torch state dict (expected 'state' and 'param_groups')"
        ) from error
    # Older versions of torch wrote None for momentum before the first step.
    return [{str(name): value for name, value in state.items() if value is not None} for state in states]


def check_parameter_state(state: Mapping[str, Any], shape: Sequence[int], number: int, path: Path) -> None:
    """Checks that an optimizer's state of a parameter has its shape, and that "step" is a number."""
    for name, value in state.items():
        actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if not (is_number if name == "step" else actual == tuple(shape)):
            raise ValueError(
                f"{path}: {name} of parameter {number} has shape {actual}, the parameter {tuple(shape)}: another "
                "model, or another order of its parameters"
            )


def _kind(t: Tensor) -> str:
    """Returns shape, and whether the dtype is real (any width), as weights are."""
    return f"{tuple(t.shape)}{'' if t.is_floating_point() else ' complex' if t.is_complex() else ' of integers'}"
