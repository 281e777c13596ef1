"""Backbone weights that other trainers wrote."""

import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

_SHOWN = 8


def load_arcface_torch(model: nn.Module, path: str | Path) -> None:
    """Loads arcface_torch's `model.pt` or `backbone.pth` (a state dict) into an `iresnet` or `mbf`, in place.

    Names and shapes must be equal one to one; ValueError lists what is missing, unexpected or of another
    shape, and then nothing has been loaded. Read with weights_only, so a file cannot run code.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise ValueError(
            f"{path}: not a file of plain tensors (a state dict saved by torch.save): {error}"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        keys = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise ValueError(
            f"{path}: expected a state dict (name -> tensor), got: {keys}. A whole training checkpoint must "
            "be reduced to its backbone first: torch.save(checkpoint['state_dict_backbone'], 'model.pt')."
        )
    wanted = model.state_dict()
    reshaped = [
        f"{name} is {tuple(found[name].shape)}, expected {tuple(wanted[name].shape)}"
        for name in wanted
        if name in found and found[name].shape != wanted[name].shape
    ]
    complaints = [
        _list("missing", [name for name in wanted if name not in found]),
        _list("unexpected", [name for name in found if name not in wanted]),
        _list("of another shape", reshaped),
    ]
    if any(complaints):
        raise ValueError(
            f"{path} does not fit this {type(model).__name__}: "
            + "; ".join(filter(None, complaints))
            + ". Is it the same network, embedding size and image size?"
        )
    model.load_state_dict(found)


def _list(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"
