"""Backbone weights that other trainers wrote."""

from pathlib import Path

from torch import Tensor, nn

from partial_fc.foreign import torch_file

_SHOWN = 8


def load_arcface_torch(model: nn.Module, path: str | Path) -> None:
    """Loads arcface_torch's `model.pt` or `backbone.pth` (a state dict) into an `iresnet` or `mbf`, in place.

    Names and shapes must be equal one to one; ValueError lists what is missing, unexpected or of another
    shape, and then nothing has been loaded. Read with weights_only, so a file cannot run code.
    """
    weights = torch_file.load(path)
    if not isinstance(weights, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in weights.items()
    ):
        keys = type(weights).__name__
        if isinstance(weights, dict):
            keys = ", ".join(key if isinstance(key, str) else type(key).__name__ for key in weights)[:200]
        raise ValueError(
            f"{path}: expected a state dict (name -> tensor), got: {keys}. A whole training checkpoint must "
            "be reduced to its backbone first: torch.save(checkpoint['state_dict_backbone'], 'model.pt')."
        )
    load_state(model, weights, path)


def load_state(model: nn.Module, weights: dict[str, Tensor], path: str | Path) -> None:
    """Loads arcface_torch's state dict, which came from `path`, as `load_arcface_torch` does."""
    expected = model.state_dict()
    reshaped = [
        f"{name} is {_kind(weights[name])}, expected {_kind(expected[name])}"
        for name in expected
        if name in weights and _kind(weights[name]) != _kind(expected[name])
    ]
    problems = [
        _list("missing", [name for name in expected if name not in weights]),
        _list("unexpected", [name for name in weights if name not in expected]),
        _list("of another shape or kind", reshaped),
    ]
    if any(problems):
        raise ValueError(
            f"{path} does not fit this {type(model).__name__}: "
            + "; ".join(filter(None, problems))
            + ". Is it the same network, embedding size and image size?"
        )
    # Without the versions of layers that torch adds: their names say enough, and a damaged file's may be anything.
    model.load_state_dict(dict(weights))


def _kind(t: Tensor) -> str:
    """Shape, and whether it holds real numbers, as weights do, or others; any width of them will do."""
    return f"{tuple(t.shape)}{'' if t.is_floating_point() else ' complex' if t.is_complex() else ' of integers'}"


def _list(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"
