"""State dicts of torch's modules and optimizers that other programs wrote: is it one, and does it fit?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor

_SHOWN = 8


def is_state_dict(value: Any) -> TypeGuard[dict[str, Tensor]]:
    """Whether it is a dictionary of tensors by name."""
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in value.items())


def check_fits(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path, model: str) -> None:
    """Checks that the weights in a file have the names and shapes of a model's own state dict. Raises ValueError, with
    what is missing, unexpected or of another shape."""
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
    lists = [f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
    if lists:
        raise ValueError(
            f"{path} does not fit this {model}: {'; '.join(lists)}. Is it the same network, embedding size and image "
            "size?"
        )


def parameter_states(optimizer: Any, path: Path) -> list[dict[str, Any]]:
    """What the state dict of an optimizer has of each parameter, by torch's names, in their order. Raises ValueError
    where it is none."""
    try:
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        states = [dict(optimizer["state"].get(number, {})) for number in numbers]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: its optimizer is no torch state dict (expected 'state' and 'param_groups')"
        ) from error
    # Older versions of torch wrote None for momentum that is not there yet.
    return [{str(name): value for name, value in state.items() if value is not None} for state in states]


def check_parameter_state(state: Mapping[str, Any], shape: Sequence[int], number: int, path: Path) -> None:
    """Checks that what an optimizer keeps of a parameter is of the parameter's shape, and "step" a number."""
    for name, value in state.items():
        actual = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        if not (is_number if name == "step" else actual == tuple(shape)):
            raise ValueError(
                f"{path}: {name} of parameter {number} has shape {actual}, the parameter {tuple(shape)}: another "
                "model, or another order of its parameters"
            )


def _kind(t: Tensor) -> str:
    """Shape, and whether it holds real numbers, as weights do, or others; any width of them will do."""
    return f"{tuple(t.shape)}{'' if t.is_floating_point() else ' complex' if t.is_complex() else ' of integers'}"


def _some(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
