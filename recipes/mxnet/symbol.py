"""Any MXNet network as a backbone: symbol.json and .params, up to the layer that gives the embedding.

All faults are reported before the first step, with file, layer and remedy.
"""

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partial_fc.files import read_text
from partial_fc.foreign import ndarray_file
from partial_fc.foreign.state_dicts import misfits
from partial_fc.printable import some

from .graph import Graph
from .library import mx

# Loss layers: their backward makes a gradient from labels and takes none.
_LOSSES = {
    *("SoftmaxOutput", "Softmax", "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput"),
    *("SVMOutput", "MakeLoss", "make_loss"),
}
_MULTIPLIERS = ("__lr_mult__", "lr_mult", "__wd_mult__", "wd_mult")


class SymbolNetwork(nn.Module):
    """A symbol's arguments as parameters and its auxiliary states as buffers, under MXNet's names; MXNet computes.

    symbol: from `data` (B, C, H, W) to one output (B, D). arrays: of all arguments but data, and all auxiliary states.
    """

    def __init__(self, symbol: "mx.sym.Symbol", arrays: dict[str, Tensor]):
        super().__init__()
        nodes = _nodes(symbol)
        self.symbol = symbol
        self.moving = _moving_averages(nodes)
        fixed = _fixed_gammas(nodes) | {name for name, value in _multipliers(symbol) if value == ("lr_mult", 0.0)}
        moving = {name for pair in self.moving for name in pair}
        names = [n for n in (*symbol.list_arguments(), *symbol.list_auxiliary_states()) if n != "data"]
        for name in names:
            _register(self, name, arrays[name], None if name in moving else name not in fixed)
        with torch.no_grad():
            for name in _fixed_gammas(nodes):  # MXNet's actual value, whatever the file holds
                self.get_parameter(name).fill_(1.0)
        self.graph = Graph(symbol, self, {name: name for name in names}, draws=True)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        return self.graph(self, image_BCHW)

    def moments(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the moving (mean, variance) of each batch norm."""
        return [(self.get_buffer(mean), self.get_buffer(variance)) for mean, variance in self.moving]

    @property
    def output_name(self) -> str:
        return _name(self.symbol)

    @property
    def digest(self) -> str:
        """Returns a digest of the graph: networks with equal digests compute the same."""
        return hashlib.sha256(self.symbol.tojson().encode()).hexdigest()[:16]


def read_network(
    symbol_path: Path, params_path: Path, output_name: str | None, image_size: int
) -> tuple[SymbolNetwork, int, list[str]]:
    """Reads the network for square RGB images, up to the output `name` (default: the only one, or a final loss layer's
    input). Returns it, the embedding's width, and notes. Raises ValueError if it is not trainable."""
    try:
        text = read_text(symbol_path)
        if not text.strip():
            raise UnicodeError("the file is empty")  # MXNet's own error would be about UTF-8
        symbol = mx.sym.load_json(text)
    except (mx.base.MXNetError, UnicodeError) as error:
        raise ValueError(f"{symbol_path} is no symbol that MXNet {mx.__version__} reads: {_brief(error)}") from error
    output = _output(symbol, output_name, symbol_path, image_size)
    where = f"{symbol_path}, up to {_name(output)}"
    arguments = output.list_arguments()
    if "data" not in arguments:
        raise ValueError(
            f"{where}: the network's input must be named data; its arguments are {some(arguments)}. Rename the "
            f"variable in {symbol_path}"
        )
    moving = {name for pair in _moving_averages(_nodes(output)) for name in pair}
    if other := [name for name in output.list_auxiliary_states() if name not in moving]:
        raise ValueError(f"{where}: unsupported auxiliary states, {some(other)}: only those of batch norms are")
    shapes, width = _shapes(output, where, image_size)
    arrays, left = _arrays(params_path, shapes, output.list_auxiliary_states(), where, image_size)
    notes = [f"{params_path}: not used up to {_name(output)}: {some(left)}"] if left else []
    if names := sorted({name for name, _ in _multipliers(output)}):
        notes.append(
            f"{symbol_path}: lr_mult and wd_mult, of {some(names)}, are not followed, but that an lr_mult of 0 keeps "
            "an argument as it is"
        )
    network = SymbolNetwork(output, arrays)
    _try(network, where, image_size, width)
    return network, width, notes


def write_network(network: SymbolNetwork, weights: Mapping[str, Tensor], prefix: Path) -> list[Path]:
    """Writes PREFIX-symbol.json and PREFIX-0000.params for mx.model.load_checkpoint(PREFIX, 0) and returns the paths.
    weights: the network's state_dict."""
    auxiliary = set(network.symbol.list_auxiliary_states())
    arrays = {f"{'aux' if name in auxiliary else 'arg'}:{name}": t for name, t in weights.items()}
    symbol, params = prefix.with_name(f"{prefix.name}-symbol.json"), prefix.with_name(f"{prefix.name}-0000.params")
    network.symbol.save(str(symbol))
    ndarray_file.write(params, arrays)
    return [symbol, params]


# ---- the symbol


def _output(symbol: "mx.sym.Symbol", name: str | None, path: Path, image_size: int) -> "mx.sym.Symbol":
    """Returns the layer that gives the embedding, with one output."""
    if name is None:
        outputs = symbol.list_outputs()
        if len(outputs) > 1:
            raise ValueError(f"{path} has {len(outputs)} outputs: {some(outputs)}; say which one with --output-name")
        output = symbol.get_children()[0] if _operator(symbol) in _LOSSES else symbol
    else:
        internals = symbol.get_internals()
        there = set(internals.list_outputs())
        found = [n for n in (f"{name}_output", name) if n in there]
        if not found:
            raise ValueError(_no_output(internals, name, path, image_size))
        output = internals[found[0]]
    losses = [node["name"] for node in _nodes(output) if node["op"] in _LOSSES]
    if losses:
        raise ValueError(
            f"{path}: {_name(output)} comes from the loss layer {losses[-1]}, which passes no gradient "
            "on; name a layer before it with --output-name"
        )
    return output


def _no_output(internals: "mx.sym.Symbol", name: str, path: Path, image_size: int) -> str:
    shapes = internals.infer_shape_partial(data=(2, 3, image_size, image_size))[1]
    arrays = {*internals.list_arguments(), *internals.list_auxiliary_states()}
    outputs = internals.list_outputs()
    wide = [o for o, shape in zip(outputs, shapes, strict=True) if o not in arrays and len(shape) == 2]
    near = difflib.get_close_matches(name, [o.removesuffix("_output") for o in outputs if o not in arrays], n=3)
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    return f"{path} has no output {name}{meant} Those of two dimensions, as an embedding has: {some(wide[::-1])}"


def _shapes(output: "mx.sym.Symbol", where: str, image_size: int) -> tuple[dict[str, tuple[int, ...]], int]:
    """Returns (shape of every array but data, the embedding's width)."""
    data = (2, 3, image_size, image_size)
    try:
        with redirect_stdout(None):  # MXNet prints the shapes; the error has them
            arguments, outputs, auxiliary = output.infer_shape(data=data)
    except (mx.base.MXNetError, ValueError) as error:
        raise ValueError(
            f"{where}: does not take {data} images: {_brief(error)}. Is --image-size {image_size} the network's?"
        ) from error
    if arguments is None or any(0 in shape for shape in (*arguments, *auxiliary)):
        raise ValueError(f"{where}: the shapes of its arrays do not follow from that of data, {data}")
    if len(outputs[0]) != 2 or outputs[0][0] != data[0]:
        raise ValueError(
            f"{where}: gives {outputs[0]} for {data} images; expected ({data[0]}, width of the embedding). Name "
            "another layer with --output-name"
        )
    names = (*output.list_arguments(), *output.list_auxiliary_states())
    shapes = dict(zip(names, (*arguments, *auxiliary), strict=True))
    del shapes["data"]
    return shapes, outputs[0][1]


def _arrays(
    path: Path, shapes: dict[str, tuple[int, ...]], auxiliary: list[str], where: str, image_size: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns (the arrays of a .params file by MXNet's names, the names that the network lacks)."""
    given = ndarray_file.read(path)
    if given and not any(name.startswith(("arg:", "aux:")) for name in given):
        raise ValueError(
            f"{path}: its names, {some(list(given))}, do not begin with arg: or aux:; expected a file of "
            "mx.model.save_checkpoint or HybridBlock.export (gluon's save_parameters writes no symbol's names)"
        )
    of_ours = {f"{'aux' if name in auxiliary else 'arg'}:{name}": name for name in shapes}
    arrays = {full: given[full] for full in of_ours if full in given}
    expected = {full: torch.empty(shapes[name], device="meta") for full, name in of_ours.items()}
    if problems := misfits(arrays, expected):
        raise ValueError(f"{path} does not fit {where}, for images of --image-size {image_size}: {problems}")
    if other := [full for full, array in arrays.items() if array.dtype != torch.float32]:
        raise ValueError(
            f"{path}: {other[0]} is {arrays[other[0]].dtype}, expected torch.float32; cast the network in MXNet "
            "(net.cast('float32'), array.astype('float32')) and save it again"
        )
    # Copies, independent of the file.
    return {of_ours[full]: array.clone() for full, array in arrays.items()}, [n for n in given if n not in of_ours]


def _try(network: SymbolNetwork, where: str, image_size: int, width: int) -> None:
    """Runs forward and backward on two images, to detect here, not in the first step, what MXNet cannot do."""
    random = torch.Generator().manual_seed(0)
    image_B = torch.rand((2, 3, image_size, image_size), generator=random)
    slope_B = torch.randn((2, width), generator=random)
    statistics = [t.clone() for t in network.buffers()]
    try:
        gradients = torch.autograd.grad(network(image_B), [p for p in network.parameters() if p.requires_grad], slope_B)
    except mx.base.MXNetError as error:
        raise ValueError(f"{where}: MXNet cannot train it: {_brief(error)}") from error
    finally:
        for t, kept in zip(network.buffers(), statistics, strict=True):
            t.copy_(kept)
    if not any(g.any() for g in gradients):
        raise ValueError(
            f"{where}: no gradient reaches an argument: an operator on the way passes none on (BlockGrad, argmax, "
            "round, ...); name a layer before it with --output-name"
        )


# ---- nodes of a symbol


def _name(symbol: "mx.sym.Symbol") -> str:
    """Returns the name of its only output."""
    return symbol.list_outputs()[0]


def _nodes(symbol: "mx.sym.Symbol") -> list[dict[str, Any]]:
    return json.loads(symbol.tojson())["nodes"]


def _operator(symbol: "mx.sym.Symbol") -> str:
    """Returns the operator of its only output."""
    graph = json.loads(symbol.tojson())
    return graph["nodes"][graph["heads"][0][0]]["op"]


def _moving_averages(nodes: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns the names of each batch norm's (mean, variance)."""
    return [(nodes[mean]["name"], nodes[variance]["name"]) for _, mean, variance in _batch_norms(nodes)]


def _fixed_gammas(nodes: list[dict[str, Any]]) -> set[str]:
    """Returns the gammas of batch norms that multiply by 1, MXNet's default."""
    return {
        nodes[node["inputs"][1][0]]["name"]
        for node, _, _ in _batch_norms(nodes)
        if node.get("attrs", {}).get("fix_gamma", "True") in ("True", "1")
    }


def _batch_norms(nodes: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int, int]]:
    """Yields (node, numbers of its moving mean's and variance's nodes)."""
    return [
        (node, node["inputs"][3][0], node["inputs"][4][0])
        for node in nodes
        if "BatchNorm" in node["op"] and len(node["inputs"]) == 5
    ]


def _multipliers(symbol: "mx.sym.Symbol") -> Iterator[tuple[str, tuple[str, float]]]:
    """Yields (argument, (lr_mult or wd_mult, its variable's value)), if that is not 1."""
    arguments = set(symbol.list_arguments())
    for name, attributes in symbol.attr_dict().items():
        for key in _MULTIPLIERS:
            if name in arguments and float(attributes.get(key, 1)) != 1:
                yield name, (key.strip("_"), float(attributes[key]))


def _register(module: nn.Module, name: str, values: Tensor, trained: bool | None) -> None:
    """Adds a tensor to the module. trained: None for a buffer. A dotted name creates nested modules."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    try:
        if trained is None:
            module.register_buffer(last, values)
        else:
            module.register_parameter(last, nn.Parameter(values, requires_grad=trained))
    except KeyError as error:
        raise ValueError(f"array {name}: a torch module cannot have one of that name ({error.args[0]})") from error


# ---- words


def _brief(error: Exception) -> str:
    """Returns MXNet's message without the place in its sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "Error" in line or "Check failed" in line] or lines
    return said[0].rpartition("MXNetError: ")[2][:300]
