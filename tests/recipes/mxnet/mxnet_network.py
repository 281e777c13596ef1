"""A small network as MXNet's users have them: with a loss layer, a dropout, a batch norm with a fixed gamma."""

import json
from typing import Any

import torch
from torch import Tensor

from partial_fc.models.iresnet import IResNet
from recipes.mxnet.symbol_file import symbol_json


def small_network(mx: Any) -> Any:
    """Pixels of square images -> fc1 (8 wide) -> ten classes."""
    x = (mx.sym.Variable("data") - 127.5) * 0.0078125
    x = mx.sym.Convolution(x, num_filter=4, kernel=(3, 3), stride=(2, 2), pad=(1, 1), no_bias=True, name="conv0")
    x = mx.sym.BatchNorm(x, name="bn0")
    x = mx.sym.LeakyReLU(x, act_type="prelu", name="relu0")
    x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max", name="pool0")
    x = mx.sym.Dropout(x, p=0.3, name="drop0")
    x = mx.sym.FullyConnected(x, num_hidden=8, name="pre_fc1")
    x = mx.sym.BatchNorm(x, fix_gamma=False, name="fc1")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10, name="fc7"), name="softmax")


def arrays_of(mx: Any, symbol: Any, image_size: int) -> dict[str, Tensor]:
    """Random arrays by the names of a .params file."""
    random = torch.Generator().manual_seed(0)
    shapes, _, states = symbol.infer_shape(data=(2, 3, image_size, image_size))
    arrays = {f"arg:{n}": s for n, s in zip(symbol.list_arguments(), shapes, strict=True)}
    del arrays["arg:data"], arrays["arg:softmax_label"]
    arrays |= {f"aux:{n}": s for n, s in zip(symbol.list_auxiliary_states(), states, strict=True)}
    return {n: torch.rand(shape, generator=random) * 0.5 + 0.25 for n, shape in arrays.items()}


def recipe_symbol(
    model: IResNet, scale: str = "0.0078125", eps: str = "2e-05", fixed: tuple[str, ...] = ("fc1",)
) -> str:
    """The graph that InsightFace's recipe makes of our network: it begins at pixels, and has settings of its own."""
    graph = json.loads(symbol_json(model))
    for node in graph["nodes"]:
        node["inputs"] = [[number + 2, 0, 0] for number, _, _ in node["inputs"]]  # also of the data: it is scaled first
        if node["op"] == "BatchNorm":
            node["attrs"] |= {"eps": eps, "fix_gamma": str(node["name"] in fixed)}
    graph["nodes"][1:1] = [
        {"op": "_minus_scalar", "name": "minus", "attrs": {"scalar": "127.5"}, "inputs": [[0, 0, 0]]},
        {"op": "_mul_scalar", "name": "times", "attrs": {"scalar": scale}, "inputs": [[1, 0, 0]]},
    ]
    graph["arg_nodes"] = [number for number, node in enumerate(graph["nodes"]) if node["op"] == "null"]
    graph["node_row_ptr"] = list(range(len(graph["nodes"]) + 1))
    graph["heads"] = [[len(graph["nodes"]) - 1, 0, 0]]
    return json.dumps(graph)
