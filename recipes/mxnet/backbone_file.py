"""Conversion of backbones from MXNet's .params to our iresnet with equal embeddings.

Names map one to one (mxnet_symbol.py). Three differences are folded into the arrays:

    fixed gammas          with fix_gamma MXNet multiplies by 1, whatever the file holds: here the 1 is written
    input scale           theirs: (pixel - 127.5) / 128, in the graph; ours: / 127.5. The first convolution absorbs it
    batch norm's epsilon  theirs: 2e-5; ours: 1e-5. The running variance absorbs the difference
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from partial_fc.foreign import networks
from partial_fc.foreign.networks import DEPTHS, Network
from partial_fc.foreign.state_dicts import check_fits
from partial_fc.models.inputs import FACE

from .symbol_file import Graph, layer_name, mxnet_names

State = dict[str, Tensor]
_FACE_STD = 127.5  # of FACE


def network_of(arrays: Mapping[str, Tensor], path: Path, image_size: int | None = None) -> Network:
    """Calls networks.network_of; also refuses, with the reason, networks that differ between MXNet and here."""
    for name in arrays:
        if "_se_" in name:
            raise ValueError(f"{path} has squeeze-and-excitation units ({name}); the networks here have none")
        if "_dw_" in name or name.startswith(("layers.", "arg:conv_1_")):
            raise ValueError(
                f"{path} is a MobileFaceNet ({name}): MXNet's and ours are not the same network; expected one of "
                f"{', '.join(DEPTHS)}"
            )
    return networks.network_of(arrays, path, image_size)


def from_mxnet(arrays: Mapping[str, Tensor], network: Network, graph: Graph, path: Path) -> tuple[State, list[str]]:
    """Returns (state dict of our network, descriptions of the changes). Raises ValueError if an array of `path` is
    missing, unexpected or of another shape."""
    state = _under_our_names(arrays, network, path)
    fixed, num_eps = [], 0
    for layer, module in _batch_norms(network.build("meta")):
        norm = graph.batch_norm(layer_name(layer))
        gamma, variance = f"{layer}.weight", f"{layer}.running_var"
        given = state[gamma]
        if norm.fix_gamma and not bool((given == 1).all()):
            fixed.append(f"{layer_name(layer)}_gamma (was {given.min():.4g} to {given.max():.4g})")
            state[gamma] = torch.ones_like(given)
        num_eps += norm.eps != module.eps
        state[variance] = (state[variance].double() + (norm.eps - module.eps)).float()
    ones = f"1 in place of {', '.join(fixed)}" if fixed else "they are 1 already"
    scale = graph.input_scale * _FACE_STD
    state["conv1.weight"] = (state["conv1.weight"].double() * scale).float()
    return state, [
        f"fixed gammas: {ones}",
        f"input scale: conv0_weight times {scale:.6g}, for / {_FACE_STD} here and * {graph.input_scale:g} in the graph",
        f"batch norm's epsilon: moving_var of {num_eps} layers plus what theirs is above 1e-05",
    ]


@torch.no_grad()
def embed(state: Mapping[str, Tensor], network: Network, image_B3HW: Tensor) -> Tensor:
    """Returns our network's embeddings of uint8 images, float64."""
    model = network.build()
    model.load_state_dict(dict(state))
    return model(FACE(image_B3HW)).double()


@torch.no_grad()
def embed_as_mxnet(
    arrays: Mapping[str, Tensor], network: Network, graph: Graph, image_B3HW: Tensor, path: Path
) -> Tensor:
    """Returns the same by MXNet's rules, with the unchanged arrays: the reference of a conversion."""
    model = network.build()
    state = _under_our_names(arrays, network, path)
    for layer, module in _batch_norms(model):
        norm = graph.batch_norm(layer_name(layer))
        module.eps = norm.eps
        if norm.fix_gamma:
            state[f"{layer}.weight"] = torch.ones_like(state[f"{layer}.weight"])
    model.load_state_dict(state)
    return model((image_B3HW.float() - _FACE_STD) * graph.input_scale).double()


def _under_our_names(arrays: Mapping[str, Tensor], network: Network, path: Path) -> State:
    """Returns MXNet's arrays under our names, fp32. Raises ValueError if they do not match."""
    model = network.build("meta")
    expected, theirs = model.state_dict(), mxnet_names(model)
    check_fits(arrays, {theirs[name]: expected[name] for name in theirs}, path, f"{network.name} of MXNet")
    counts = {name: torch.zeros((), dtype=torch.int64) for name in expected if name not in theirs}
    return {name: arrays[theirs[name]].float() for name in theirs} | counts


def _batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """Returns the batch norms by our names."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
