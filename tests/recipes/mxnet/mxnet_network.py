"""Networks as InsightFace's MXNet recipe writes them."""

import json
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from partial_fc.models.iresnet import IResNet
from recipes.mxnet.symbol_file import layer_name, mxnet_names


def recipe_symbol(
    model: IResNet, scale: str = "0.0078125", eps: str = "2e-05", fixed: tuple[str, ...] = ("fc1",)
) -> str:
    """The graph that InsightFace's recipe makes of our network: it begins at pixels, and has settings of its own."""
    nodes: list[dict[str, Any]] = []
    theirs = mxnet_names(model)

    def add(operator: str, name: str, *inputs: int, **attrs: object) -> int:
        texts = {key: str(value) for key, value in attrs.items()}
        nodes.append({"op": operator, "name": name, "attrs": texts, "inputs": [[number, 0, 0] for number in inputs]})
        return len(nodes) - 1

    def add_layers(x: int, *names: str) -> int:
        """Appends layers in sequence, each with its arrays."""
        for name in names:
            arrays = [add("null", its[4:]) for ours, its in theirs.items() if ours.rpartition(".")[0] == name]
            operator, attrs = _operator(model.get_submodule(name))
            attrs |= {"eps": eps, "fix_gamma": layer_name(name) in fixed} if operator == "BatchNorm" else {}
            x = add(operator, layer_name(name), x, *arrays, **attrs)
        return x

    x = add("_minus_scalar", "minus", add("null", "data"), scalar="127.5")
    x = add_layers(add("_mul_scalar", "times", x, scalar=scale), "conv1", "bn1", "prelu")
    blocks = [f"{stage}.{number}" for stage in model.stages for number in range(len(getattr(model, stage)))]
    for block in blocks:
        y = add_layers(x, *(f"{block}.{layer}" for layer in ("bn1", "conv1", "bn2", "prelu", "conv2", "bn3")))
        if not isinstance(model.get_submodule(f"{block}.downsample"), nn.Identity):
            x = add_layers(x, f"{block}.downsample.0", f"{block}.downsample.1")
        x = add("elemwise_add", f"{block}_plus", y, x)
    x = add_layers(x, "bn2", "fc", "features")
    symbol = {
        "nodes": nodes,
        "arg_nodes": [number for number, node in enumerate(nodes) if node["op"] == "null"],
        "node_row_ptr": list(range(len(nodes) + 1)),
        "heads": [[x, 0, 0]],
        "attrs": {"mxnet_version": ["int", 10901]},
    }
    return json.dumps(symbol)


def _operator(module: nn.Module) -> tuple[str, dict[str, object]]:
    """MXNet's operator for a layer, and its attributes."""
    match module:
        case nn.Conv2d():
            sizes = {"kernel": module.kernel_size, "stride": module.stride, "pad": module.padding}
            return "Convolution", {"num_filter": module.out_channels, "no_bias": True, **sizes}
        case nn.Linear():
            return "FullyConnected", {"num_hidden": module.out_features}
        case _BatchNorm():
            return "BatchNorm", {}
        case nn.PReLU():
            return "LeakyReLU", {"act_type": "prelu"}
    return "Activation", {"act_type": "relu"}
