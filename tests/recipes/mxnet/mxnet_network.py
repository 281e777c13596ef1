"""Networks as InsightFace's MXNet recipe writes them."""

import json

from partial_fc.models.iresnet import IResNet
from recipes.mxnet.symbol_file import symbol_json


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
