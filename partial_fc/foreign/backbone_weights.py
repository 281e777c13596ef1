"""Backbone weights from single files: ours, and other trainers'."""

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from partial_fc.files import check_regular
from partial_fc.foreign import torch_file
from partial_fc.foreign.state_dicts import check_fits, is_state_dict, without_prefix

# Keys of the weights in a whole checkpoint: arcface_torch's, Lightning's, and common hand-written ones.
_KEYS = ("state_dict_backbone", "state_dict", "model_state_dict", "model")


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads (state dict, what the file states about it) from a .safetensors or torch.save file: a state dict, or a
    checkpoint, of which the backbone counts. Drops prefixes of wrappers and larger modules. Executes no code in a file.
    Raises ValueError for anything else."""
    if path.suffix == ".safetensors":
        check_regular(path)
        try:
            with safe_open(path, "pt") as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return without_prefix(weights), file.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file, or cut short: {error}") from error
    found = torch_file.load(path)
    parts = [found.get(key) for key in _KEYS] if isinstance(found, dict) else []
    weights = next((part for part in parts if is_state_dict(part) and part), found)
    if not is_state_dict(weights):
        keys: Iterable[object] = found if isinstance(found, dict) else [type(found).__name__]
        raise ValueError(
            f"{path}: expected a state dict (name -> tensor), or a checkpoint with one as {', '.join(_KEYS)}, got: "
            f"{', '.join(map(str, keys))[:200]}"
        )
    return without_prefix(weights), {}


def load_weights(model: nn.Module, path: str | Path, leave_out: str = "") -> None:
    """Loads a file's weights in place, except names that begin with leave_out. Raises ValueError, with what is missing,
    unexpected or of another shape, before changing anything."""
    weights, _ = read_weights(Path(path))
    wanted = {name: t for name, t in weights.items() if not leave_out or not name.startswith(leave_out)}
    load_state(model, wanted, Path(path))


def load_state(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Loads a state dict, which came from `path`, as `load_weights` does."""
    check_fits(weights, model.state_dict(), path, type(model).__name__)
    # Without torch's layer versions: names suffice, and a damaged file may contain anything there.
    model.load_state_dict(dict(weights))
