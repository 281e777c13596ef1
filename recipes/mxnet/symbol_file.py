"""Our iresnet in InsightFace's MXNet recipe (fresnet with unit 3, output 'FC'): names of layers and arrays, and a
reader of the graph in symbol.json, without MXNet.

A symbol is a list of nodes; an input is [node, output of it, version]. Nodes without an operator are arrays. (Source:
recognition/arcface_mxnet/symbol/: fresnet.py, resnet.py, symbol_utils.py.)
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from partial_fc.files import read_text
from partial_fc.printable import some

EMBEDDING = "fc1"  # the output layer
# Layers and arrays with different names: of the network, of a block, of a batch norm or PReLU.
_LAYERS = {"conv1": "conv0", "bn1": "bn0", "prelu": "relu0", "bn2": "bn1", "fc": "pre_fc1", "features": EMBEDDING}
_IN_BLOCK = {"prelu": "relu1", "downsample.0": "conv1sc", "downsample.1": "sc"}
_OF_NORM = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_var"}
_MEAN, _SCALE, _EPS = 127.5, 0.0078125, 2e-5


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm's settings. fix_gamma: it multiplies by 1, whatever its gamma."""

    eps: float
    fix_gamma: bool


@dataclass(frozen=True)
class Graph:
    """The settings of a graph outside the .params arrays. Its network sees (pixel - 127.5) * input_scale. batch_norms:
    by layer; None: those of InsightFace's recipe."""

    input_scale: float = _SCALE
    batch_norms: Mapping[str, BatchNorm] | None = None

    def batch_norm(self, layer: str) -> BatchNorm:
        """Returns a layer's batch norm. Raises ValueError for a layer that the graph lacks."""
        if self.batch_norms is None:
            return BatchNorm(_EPS, fix_gamma=layer == EMBEDDING)
        if layer not in self.batch_norms:
            raise ValueError(
                f"the symbol has no BatchNorm called {layer!r}, which the arrays have: it is another network's, with "
                f"{some(list(self.batch_norms)) or 'no BatchNorm'}"
            )
        return self.batch_norms[layer]


# ---- names


def layer_name(layer: str) -> str:
    """Returns MXNet's name of a layer: "layer2.0.downsample.1" -> "stage2_unit1_sc"."""
    if found := re.fullmatch(r"layer(\d+)\.(\d+)\.(.+)", layer):
        return f"stage{found[1]}_unit{int(found[2]) + 1}_{_IN_BLOCK.get(found[3], found[3])}"
    return _LAYERS[layer]


def mxnet_names(model: nn.Module) -> dict[str, str]:
    """Maps an iresnet's state-dict names to "arg:..." or "aux:..." of MXNet, which has no num_batches_tracked."""
    return {
        f"{layer}.{array}": f"{'aux' if array.startswith('running') else 'arg'}:{layer_name(layer)}_{theirs}"
        for layer, module in model.named_modules()
        for array, theirs in _arrays(module)
    }


def _arrays(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields a layer's own arrays: (torch's name, MXNet's)."""
    renamed = _OF_NORM if isinstance(module, _BatchNorm | nn.PReLU) else {}
    for array, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if array != "num_batches_tracked":
            yield array, renamed.get(array, array)


# ---- reading


def read(path: Path) -> Graph:
    """Reads a symbol.json. Raises ValueError for a file that is no symbol, or whose network begins differently."""
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
    """Returns a node's attributes; older versions had other keys."""
    return {**node.get("param", {}), **node.get("attr", {}), **node.get("attrs", {})}


def _input(nodes: Sequence[dict[str, Any]], number: int) -> tuple[float, float]:
    """Returns (scale, offset): the node's value is pixel * scale + offset."""
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
