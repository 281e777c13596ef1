"""GluonCV's .params files (`net.save_parameters`) for our SlowFast, read without MXNet."""

from pathlib import Path

from torch import Tensor, nn

from partial_fc.foreign import ndarray_file
from partial_fc.foreign.state_dicts import check_fits

_OURS = {"gamma": "weight", "beta": "bias"}  # of a batch norm; running_mean and running_var have the same name in both


def load(model: nn.Module, path: Path) -> None:
    """Loads a file's weights and running statistics. Raises ValueError for names or shapes that do not match."""
    found = {_our_name(name): t for name, t in ndarray_file.read(path).items()}
    expected = {name: t for name, t in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    check_fits(found, expected, path, "network of GluonCV")
    model.load_state_dict(found, strict=False)


def _our_name(name: str) -> str:
    layer, _, array = name.rpartition(".")
    return f"{layer}.{_OURS.get(array, array)}"


def arrays(model: nn.Module) -> dict[str, Tensor]:
    """Returns the same by GluonCV's names, for `ndarray_file.write`."""
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    theirs = {ours: name for name, ours in _OURS.items()}
    named = {}
    for name, t in model.state_dict().items():
        layer, _, array = name.rpartition(".")
        if array != "num_batches_tracked":
            named[f"{layer}.{theirs.get(array, array)}" if layer in norms else name] = t
    return named
