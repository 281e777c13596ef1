"""Parameters that GluonCV published or wrote (`net.save_parameters`), for our SlowFast: .params files, read without
MXNet."""

from pathlib import Path

from torch import Tensor, nn

from partial_fc.foreign import mxnet_ndarray
from partial_fc.foreign.state_dicts import check_fits

_OURS = {"gamma": "weight", "beta": "bias"}  # of a batch norm; running_mean and running_var are called so in both


def load(model: nn.Module, path: Path, leave_out: str = "") -> list[str]:
    """Takes over the weights and running statistics of a file. leave_out: what a name begins with that is not taken,
    such as "fc." where there are other classes. Returns the names of the model that keep their values. Raises
    ValueError where names or shapes do not fit."""
    found = {_our_name(name): t for name, t in mxnet_ndarray.read(path).items()}
    expected = {name: t for name, t in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    left_out = [name for name in expected if leave_out and name.startswith(leave_out)]
    taken = {name: t for name, t in found.items() if name not in left_out}
    check_fits(taken, {name: t for name, t in expected.items() if name not in left_out}, path, "network of GluonCV")
    model.load_state_dict(taken, strict=False)
    return left_out


def _our_name(name: str) -> str:
    layer, _, array = name.rpartition(".")
    return f"{layer}.{_OURS.get(array, array)}"


def arrays(model: nn.Module) -> dict[str, Tensor]:
    """The same, by GluonCV's names, for `mxnet_ndarray.write`."""
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    theirs = {ours: name for name, ours in _OURS.items()}
    named = {}
    for name, t in model.state_dict().items():
        layer, _, array = name.rpartition(".")
        if array != "num_batches_tracked":
            named[f"{layer}.{theirs.get(array, array)}" if layer in norms else name] = t
    return named
