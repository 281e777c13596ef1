"""MXNet's symbol.json, without MXNet: what a graph does to its input and in its batch norms, and the graph of our
iresnet as InsightFace's recipe has it (fresnet with unit 3, output 'FC'; read in symbol/resnet.py and symbol_utils.py).

A symbol is a list of nodes; an input is [node, output of it, version]. Nodes without an operator are arrays.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from partial_fc.files import read_text
from partial_fc.foreign.mxnet_names import layer_name
from partial_fc.models.iresnet import IResNet

EMBEDDING = "fc1"  # the layer whose output it is
_MEAN, _SCALE, _EPS = 127.5, 0.0078125, 2e-5
_VERSION = ("int", 10901)


@dataclass(frozen=True)
class BatchNorm:
    """fix_gamma: it multiplies by 1, whatever its gamma says."""

    eps: float
    fix_gamma: bool


@dataclass(frozen=True)
class Graph:
    """What of a graph is in no array of a .params file. Its network sees (pixel - 127.5) * input_scale. batch_norms: by
    layer; None: those of InsightFace's recipe."""

    input_scale: float = _SCALE
    batch_norms: Mapping[str, BatchNorm] | None = None

    def batch_norm(self, layer: str) -> BatchNorm:
        """Raises ValueError for a layer that the graph has not."""
        if self.batch_norms is None:
            return BatchNorm(_EPS, fix_gamma=layer == EMBEDDING)
        if layer not in self.batch_norms:
            raise ValueError(f"the symbol has no BatchNorm called {layer!r}: is it the symbol of these arrays?")
        return self.batch_norms[layer]


# ---- reading


def read(path: Path) -> Graph:
    """Raises ValueError for a file that is no symbol, or whose network begins in another way."""
    try:
        nodes = json.loads(read_text(path))["nodes"]
        by_name = {node["name"]: node for node in nodes}
        norms = {
            name: BatchNorm(float(attrs.get("eps", 1e-3)), attrs.get("fix_gamma", "True") in ("True", "1"))
            for name, node in by_name.items()
            if node["op"] == "BatchNorm"
            for attrs in [_attrs(node)]
        }
        if "conv0" not in by_name or EMBEDDING not in norms:
            raise ValueError("it has no Convolution 'conv0' or no BatchNorm 'fc1', where InsightFace's networks begin "
                             "and end")  # fmt: skip
        scale, offset = _input(nodes, by_name["conv0"]["inputs"][0][0])
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no symbol of MXNet: {error!r}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not (scale > 0 and abs(-offset / scale - _MEAN) <= 1e-3):
        raise ValueError(
            f"{path}: its network sees pixel * {scale:g} + {offset:g}; expected (pixel - {_MEAN}) * SCALE, since the "
            f"edges of images are padded with what is {_MEAN} there"
        )
    return Graph(scale, norms)


def _attrs(node: dict[str, Any]) -> dict[str, str]:
    """Of a node; older versions had other words for it."""
    return {**node.get("param", {}), **node.get("attr", {}), **node.get("attrs", {})}


def _input(nodes: Sequence[dict[str, Any]], number: int) -> tuple[float, float]:
    """(scale, offset): the node's value is pixel * scale + offset."""
    node = nodes[number]
    if node["op"] == "null":
        return 1.0, 0.0
    scale, offset = _input(nodes, node["inputs"][0][0])
    operation, scalar = node["op"], float(_attrs(node).get("scalar", "nan"))
    if operation in ("_copy", "identity", "Cast", "cast"):
        return scale, offset
    if operation in ("_minus_scalar", "_plus_scalar"):
        return scale, offset + (scalar if operation == "_plus_scalar" else -scalar)
    if operation in ("_mul_scalar", "_div_scalar"):
        factor = scalar if operation == "_mul_scalar" else 1 / scalar
        return scale * factor, offset * factor
    raise ValueError(f"{operation} {node['name']!r} lies before conv0; expected (pixel - {_MEAN}) * SCALE alone")


# ---- writing


def symbol_json(model: IResNet, as_torch: bool = False) -> str:
    """The symbol of a network, as mxnet.sym.Symbol.tojson gives it: arrays under MXNet's names, pixels 0 to 255 (RGB)
    as "data", the embedding as "fc1_output".

    as_torch: of what the torch network computes: it takes what that takes, and its batch norms have their epsilon and
    every gamma."""
    graph = _Writer(model if as_torch else None)
    x = graph.add("null", "data", [])
    if not as_torch:
        x = graph.add("_minus_scalar", "_minusscalar0", [x], scalar=_MEAN)
        x = graph.add("_mul_scalar", "_mulscalar0", [x], scalar=_SCALE)
    x = graph.convolution(x, "conv1", model.conv1)
    x = graph.batch_norm(x, "bn1")
    x = graph.activation(x, "prelu", model.prelu)
    for stage in model.stages:
        for number, block in enumerate(getattr(model, stage)):
            x = _block(graph, x, f"{stage}.{number}", block)
    x = graph.batch_norm(x, "bn2")
    width = {"num_hidden": model.fc.out_features}
    x = graph.layer("FullyConnected", "fc", x, ("weight", "bias"), no_bias=False, **width)
    x = graph.batch_norm(x, "features")
    arrays = [number for number, node in enumerate(graph.nodes) if node["op"] == "null"]
    symbol = {
        "nodes": graph.nodes,
        "arg_nodes": arrays,
        "node_row_ptr": list(range(len(graph.nodes) + 1)),
        "heads": [[x, 0, 0]],
        "attrs": {"mxnet_version": _VERSION},
    }
    return json.dumps(symbol, indent=2) + "\n"


def _block(graph: "_Writer", x: int, name: str, block: Any) -> int:
    y = graph.batch_norm(x, f"{name}.bn1")
    y = graph.convolution(y, f"{name}.conv1", block.conv1)
    y = graph.batch_norm(y, f"{name}.bn2")
    y = graph.activation(y, f"{name}.prelu", block.prelu)
    y = graph.convolution(y, f"{name}.conv2", block.conv2)
    y = graph.batch_norm(y, f"{name}.bn3")
    if not isinstance(block.downsample, nn.Identity):
        x = graph.convolution(x, f"{name}.downsample.0", block.downsample[0])
        x = graph.batch_norm(x, f"{name}.downsample.1")
    sums = sum(node["op"] == "elemwise_add" for node in graph.nodes)
    return graph.add("elemwise_add", f"_plus{sums}", [y, x])


class _Writer:
    """A graph that grows. Methods take and return numbers of nodes; layers go by our names. norms_of: whose batch norms
    they are; None: InsightFace's."""

    def __init__(self, norms_of: IResNet | None) -> None:
        self._norms_of = norms_of
        self.nodes: list[dict[str, Any]] = []

    def add(self, operator: str, name: str, inputs: Sequence[int], **attrs: object) -> int:
        node: dict[str, Any] = {"op": operator, "name": name}
        if attrs:
            node["attrs"] = {key: str(value) for key, value in attrs.items()}
        self.nodes.append({**node, "inputs": [[number, 0, 0] for number in inputs]})
        return len(self.nodes) - 1

    def layer(self, operator: str, name: str, x: int, arrays: Sequence[str], **attrs: object) -> int:
        """An operator with arrays of its own."""
        theirs = layer_name(name)
        return self.add(operator, theirs, [x, *(self.add("null", f"{theirs}_{a}", []) for a in arrays)], **attrs)

    def convolution(self, x: int, name: str, module: nn.Conv2d) -> int:
        sizes = {"kernel": module.kernel_size, "stride": module.stride, "pad": module.padding}
        return self.layer("Convolution", name, x, ("weight",), num_filter=module.out_channels, no_bias=True, **sizes)

    def batch_norm(self, x: int, name: str) -> int:
        arrays = ("gamma", "beta", "moving_mean", "moving_var")
        norm = Graph().batch_norm(layer_name(name))
        if self._norms_of is not None:
            layer = self._norms_of.get_submodule(name)
            assert isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d))
            norm = BatchNorm(layer.eps, fix_gamma=False)
        return self.layer("BatchNorm", name, x, arrays, eps=norm.eps, momentum=0.9, fix_gamma=norm.fix_gamma)

    def activation(self, x: int, name: str, module: nn.Module) -> int:
        if isinstance(module, nn.PReLU):
            return self.layer("LeakyReLU", name, x, ("gamma",), act_type="prelu")
        assert isinstance(module, nn.ReLU)
        return self.layer("Activation", name, x, (), act_type="relu")
