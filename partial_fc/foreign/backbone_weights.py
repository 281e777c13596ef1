"""Backbone weights that other trainers wrote."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor, nn

from partial_fc.foreign import torch_file
from partial_fc.foreign.state_dicts import check_fits, is_state_dict


def load_weights(model: nn.Module, path: str | Path, leave_out: str = "") -> None:
    """Loads a state dict, in place: arcface_torch's `model.pt` or `backbone.pth` into an `iresnet` or `mbf`,
    torchvision's file into a `resnet`. leave_out: names of the file that begin so are not wanted.

    Names and shapes must be equal one to one; ValueError lists what is missing, unexpected or of another
    shape, and then nothing has been loaded. Read with weights_only, so a file cannot run code.
    """
    weights = torch_file.load(path)
    if not is_state_dict(weights):
        keys: Iterable[object] = weights if isinstance(weights, dict) else [type(weights).__name__]
        raise ValueError(
            f"{path}: expected a state dict (name -> tensor), got: {', '.join(map(str, keys))[:200]}. A whole training "
            "checkpoint must be reduced to its backbone first: torch.save(checkpoint['state_dict_backbone'], "
            "'model.pt')."
        )
    wanted = {name: t for name, t in weights.items() if not leave_out or not name.startswith(leave_out)}
    load_state(model, wanted, Path(path))


def load_state(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Loads a state dict, which came from `path`, as `load_weights` does."""
    check_fits(weights, model.state_dict(), path, type(model).__name__)
    # Without the versions of layers that torch adds: their names say enough, and a damaged file's may be anything.
    model.load_state_dict(dict(weights))
