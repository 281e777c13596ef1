"""GluonCV's files for our SlowFast, read without MXNet: .params (`net.save_parameters`) and .states
(`trainer.save_states`).

A .states file is a pickle of ({index: momentum}, optimizer), without names. The index is that of the parameter among
all of the network, running statistics included, sorted by Gluon's names, which follow from the network's own; with
--freeze-bn among all weights and biases. (Observed in files of GluonCV 0.10.5 with MXNet 1.9.1.)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from partial_fc.data import restricted_pickle
from partial_fc.files import read_bytes
from partial_fc.foreign import ndarray_file
from partial_fc.foreign.state_dicts import check_fits

_MOST_BYTES = 16 << 30
_TRAINED = "SlowFast network that NAG or SGD with momentum has trained"
_OURS = {"gamma": "weight", "beta": "bias"}  # of a batch norm; running_mean and running_var have the same name in both


def load(model: nn.Module, path: Path, leave_out: str = "") -> list[str]:
    """Loads a file's weights and running statistics. leave_out: prefix of names to skip, such as "fc.". Returns the
    names of the model that keep their values. Raises ValueError for names or shapes that do not match."""
    found = {_our_name(name): t for name, t in ndarray_file.read(path).items()}
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
    """Returns the same by GluonCV's names, for `ndarray_file.write`."""
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    theirs = {ours: name for name, ours in _OURS.items()}
    named = {}
    for name, t in model.state_dict().items():
        layer, _, array = name.rpartition(".")
        if array != "num_batches_tracked":
            named[f"{layer}.{theirs.get(array, array)}" if layer in norms else name] = t
    return named


class TrainerStates(NamedTuple):
    """A .states file. momentum: by our parameter names, as in RateInMomentum. masters: the fp32 weights of a float16
    network, else empty. num_updates: made so far."""

    momentum: dict[str, Tensor]
    masters: dict[str, Tensor]
    num_updates: int


def read_states(model: nn.Module, path: Path) -> TrainerStates:
    """Reads a .states file for this network's trained parameters. Raises ValueError for any other file."""
    states, num_updates = _unpickled(path)
    order = sorted(arrays(model), key=_gluons_name)
    layers = [name for name in order if name.endswith(("weight", "bias"))]
    if states.keys() == set(range(len(layers))):  # without the gaps that running statistics leave
        order = layers
    order = [_our_name(name) for name in order]
    parameters = dict(model.named_parameters())
    momentum: dict[str, Tensor] = {}
    masters: dict[str, Tensor] = {}
    for place, state in states.items():
        if not 0 <= place < len(order) or order[place] not in parameters:
            raise ValueError(f"{path}: momentum at place {place}, where this network has none: it is another one's")
        name = order[place]
        for array, values in zip(state, (momentum, masters), strict=False):
            values[name] = array.tensor(f"{path}, place {place}")
            check_fits({name: values[name]}, {name: parameters[name]}, path, "network")
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    # MXNet adds its momentum to the weights; ours is subtracted.
    momentum = {name: -t for name, t in momentum.items() if name in trained}
    check_fits(momentum, trained, path, "network")
    return TrainerStates(momentum, masters, num_updates)


def _gluons_name(name: str) -> str:
    """Returns Gluon's name of a parameter, without the network's prefix, given its name in a .params file."""
    *layers, array = name.split(".")
    kind = "conv" if array == "weight" else "batchnorm"
    match layers:
        case ["fc"]:
            return f"dense0_{array}"
        case [first]:  # fast_conv1, slow_bn1
            return f"{first.partition('_')[0]}_{kind}0_{array}"
        case [lateral, _]:
            return f"{lateral}_{kind}0_{array}"
        case [stage, _, "downsample", _]:
            return f"{stage}_downsample_{kind}0_{array}"
    stage, block, layer = layers
    return f"{stage}_block{block}_{kind}{int(layer[-1]) - 1}_{array}"


# ---- the pickle


class _Array:
    """An NDArray."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def tensor(self, what: str) -> Tensor:
        match self.state:
            case {"handle": bytes() as content}:
                return ndarray_file.read_one(content, what)
        raise ValueError(f"{what}: an array without numbers")


class _Other(_Array):
    """Any other object, such as an optimizer or a schedule; never executed."""

    name = ""


def _unpickled(path: Path) -> tuple[dict[int, tuple[_Array, ...]], int]:
    """Returns (index -> momentum, with its master for a float16 weight; the number of updates)."""
    try:
        found = restricted_pickle.loads(read_bytes(path, _MOST_BYTES), _Unpickler)
    except ValueError as error:
        raise ValueError(f"{path} is no file of Gluon's trainer.save_states: {error}") from error
    match found:
        case (dict() as states, _Other(name="NAG" | "SGD", state={"num_update": int() as num_updates})):
            each = {place: s if isinstance(s, tuple) else (s,) for place, s in states.items()}
            if all(type(place) is int and _is_state(state) for place, state in each.items()):
                return each, num_updates
        case (dict(), _Other(name=name)) if name not in ("NAG", "SGD"):
            raise ValueError(f"{path} has the state of optimizer {name}; expected that of a {_TRAINED}")
    raise ValueError(f"{path} is no file of Gluon's trainer.save_states for a {_TRAINED}")


def _is_state(state: tuple[Any, ...]) -> bool:
    return len(state) in (1, 2) and all(type(array) is _Array for array in state)


class _Unpickler(restricted_pickle.Unpickler):
    """Unpickles plain values and arrays; other objects only as their contents."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) == ("mxnet.ndarray.ndarray", "NDArray"):
            return _Array
        if module.partition(".")[0] in ("mxnet", "gluoncv"):
            return type("_Other", (_Other,), {"name": name})
        return super().find_class(module, name)
