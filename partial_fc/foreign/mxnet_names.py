"""What the arrays of our iresnet are called in InsightFace's MXNet recipe (fresnet with unit 3, output 'FC').

    ours (arcface_torch's)              MXNet's
    conv1.weight                        arg:conv0_weight
    bn1.weight, .bias                   arg:bn0_gamma, arg:bn0_beta
    bn1.running_mean, .running_var      aux:bn0_moving_mean, aux:bn0_moving_var
    prelu.weight                        arg:relu0_gamma
    layer2.0.prelu.weight               arg:stage2_unit1_relu1_gamma
    layer2.0.downsample.0.weight, .1    arg:stage2_unit1_conv1sc_weight, stage2_unit1_sc_...
    bn2, fc, features                   bn1, pre_fc1, fc1

One to one in names and shapes, for every depth (read in recognition/arcface_mxnet/symbol/fresnet.py, and compared).
"""

import re
from collections.abc import Iterable

# Layers outside the stages, and those of a block: ours -> (MXNet's, their kind).
_CONV, _LINEAR, _BN, _PRELU = "conv", "linear", "bn", "prelu"
_LAYERS = {
    "conv1": ("conv0", _CONV),
    "bn1": ("bn0", _BN),
    "prelu": ("relu0", _PRELU),
    "bn2": ("bn1", _BN),
    "fc": ("pre_fc1", _LINEAR),
    "features": ("fc1", _BN),
}
_BLOCK_LAYERS = {
    "bn1": ("bn1", _BN),
    "conv1": ("conv1", _CONV),
    "bn2": ("bn2", _BN),
    "prelu": ("relu1", _PRELU),
    "conv2": ("conv2", _CONV),
    "bn3": ("bn3", _BN),
    "downsample.0": ("conv1sc", _CONV),
    "downsample.1": ("sc", _BN),
}
# Of each kind of layer, what a state dict calls its arrays -> (MXNet's kind, ending of the name).
_ARRAYS = {
    _CONV: {"weight": ("arg", "weight")},
    _LINEAR: {"weight": ("arg", "weight"), "bias": ("arg", "bias")},
    _PRELU: {"weight": ("arg", "gamma")},
    _BN: {
        "weight": ("arg", "gamma"),
        "bias": ("arg", "beta"),
        "running_mean": ("aux", "moving_mean"),
        "running_var": ("aux", "moving_var"),
    },
}
_BLOCK = re.compile(r"layer(\d+)\.(\d+)\.(.+)")


def mxnet_names(state_names: Iterable[str]) -> dict[str, str]:
    """Names of a state dict of `iresnet` (any depth, `tiny` and `mini` too) -> "arg:..." or "aux:..." of MXNet, in
    their order. num_batches_tracked has none there and is left out. Raises ValueError for a name that no iresnet
    has."""
    return {name: _mxnet_name(name) for name in state_names if not name.endswith(".num_batches_tracked")}


def layer_name(layer: str) -> str:
    """The same for a layer: "layer2.0.downsample.1" -> "stage2_unit1_sc". ValueError as `mxnet_names`."""
    return _layer(layer)[0]


def _mxnet_name(name: str) -> str:
    layer, _, array = name.rpartition(".")
    theirs, kind = _layer(layer)
    if array not in _ARRAYS[kind]:
        raise _unknown(name)
    space, ending = _ARRAYS[kind][array]
    return f"{space}:{theirs}_{ending}"


def _layer(layer: str) -> tuple[str, str]:
    """(MXNet's name, which kind of layer it is)."""
    layers, prefix, inner = _LAYERS, "", layer
    if in_block := _BLOCK.fullmatch(layer):
        stage, block, inner = in_block.groups()
        layers, prefix = _BLOCK_LAYERS, f"stage{stage}_unit{int(block) + 1}_"
    if inner not in layers:
        raise _unknown(layer)
    theirs, kind = layers[inner]
    return prefix + theirs, kind


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"{name!r} is no part of an iresnet (r18 to r200, tiny, mini), the network that MXNet's names are known for"
    )
