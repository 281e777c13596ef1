"""Reader of face networks that are published as ONNX only, as InsightFace's w600k_r50.onnx of buffalo_l, and of our own
exports.

Exporters rename and fold weights, but keep the order of those of one shape. So each layer of a network here takes the
next one of its kind and shape, and the result is compared with onnxruntime's output of the file.

    a batch norm behind a convolution    is folded into it by torch's exporter: here one that adds the folded bias
    a batch norm's epsilon               if it is not ours, the running variance absorbs the difference
    (pixel - 127.5) * factor             is in the graph of networks from MXNet: the first convolution absorbs it
"""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from partial_fc.errors import package
from partial_fc.file_kind import it_is
from partial_fc.files import check_regular
from partial_fc.foreign.ir_blocks import identity_norm
from partial_fc.foreign.networks import DEPTHS, Network
from partial_fc.models import SMALLEST_IMAGE
from partial_fc.models.inputs import FACE

_LAYERS = {"Conv": "Conv", "BatchNormalization": "BN", "PRelu": "PRelu", "Gemm": "Gemm", "MatMul": "Gemm"}
_SHAPES = {"Flatten", "Reshape", "Shape", "Gather", "Unsqueeze", "Concat"}
_OTHERS = {"Identity", "Cast", "Dropout", "Constant", "Add", "Sub", "Mul", "Relu", "LeakyRelu"} | _SHAPES
_TOLERANCE, _TOLERANCE_FP16 = 1e-4, 0.03  # of the largest feature
_FACE_STD = 127.5


class _Layer(NamedTuple):
    kind: str
    source: str  # the name of its input
    output: str
    values: list[Tensor]  # its other inputs, as torch has them
    epsilon: float


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads (weights under our names, what the file states, with a note). Raises ValueError if a package is missing, or
    for another network, which the message describes."""
    onnx = package("onnx", "ONNX", "export")
    check_regular(path)
    try:
        proto = onnx.load(str(path))
        layers, factor = _layers(proto, onnx)
        weights = {each.name for each in proto.graph.initializer}
        inputs = [each for each in proto.graph.input if each.name not in weights]  # old exporters list weights, too
        shape = [each.dim_value for each in inputs[0].type.tensor_type.shape.dim]
    except Exception as error:  # protobuf's, onnx's and numpy's, for damaged files
        raise ValueError(f"{path} cannot be read as ONNX: {str(error)[:300]}{it_is(path)}") from error
    kinds = Counter(node.op_type for node in proto.graph.node)
    size = shape[2] if len(shape) == 4 and shape[2] == shape[3] > 0 else 112
    width = next((len(one.values[0]) for one in layers if one.kind == "Gemm" and one.values), 0)
    is_known = kinds.keys() <= _LAYERS.keys() | _OTHERS and size >= SMALLEST_IMAGE and width
    half = any(each.data_type == onnx.TensorProto.FLOAT16 for each in proto.graph.initializer)
    for name in (*DEPTHS, "mbf") if is_known else ():
        network = Network(name, width, size)
        found, num_folded = _matched(layers, network)
        if not found:
            continue
        first = next(iter(found))  # the first convolution
        found[first] *= (factor or 1 / _FACE_STD) * _FACE_STD
        difference = _difference(found, network, path, shape[0], bool(factor))
        if difference <= (_TOLERANCE_FP16 if half else _TOLERANCE):
            facts = {each.key: each.value for each in proto.metadata_props if each.key in ("flip", "step")}
            facts |= {"recipe": "face", "network": name, "embedding_size": str(width), "image_size": str(size)}
            facts["note"] = (
                f"the weights of {name}, for RGB; largest difference to onnxruntime's features: {difference:.1e} of "
                f"the largest. {num_folded} batch norms are folded into other layers, so that the file lacks their "
                "statistics: embeddings are equal, but training starts with other activations than the network had"
            )
            return found, facts
    dims = [dim.dim_param or dim.dim_value for dim in inputs[0].type.tensor_type.shape.dim] if inputs else []
    raise ValueError(
        f"{path} is an ONNX model of {proto.producer_name or 'unknown'} {proto.producer_version}: inputs "
        f"{', '.join(each.name for each in inputs[:4])} {tuple(dims)}, outputs "
        f"{', '.join(each.name for each in proto.graph.output[:4])}, operators "
        f"{', '.join(f'{kind} {count}' for kind, count in kinds.most_common(8))}. Weights are read of "
        f"{', '.join(DEPTHS)} and mbf in fp32 and fp16. Give what it was exported from, or embed your images in "
        "onnxruntime: train, search and evaluate take vectors (docs/vectors.md)"
    )


def session_of(path: Path) -> Any:
    """Returns onnxruntime's session of a file, on the CPU."""
    runtime = package("onnxruntime", "ONNX", "export")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _layers(proto: Any, onnx: Any) -> tuple[list[_Layer], float]:
    """Returns (the layers with weights, the factor of pixels less 127.5 in the graph, 0 if that is done outside)."""
    values = {each.name: onnx.numpy_helper.to_array(each) for each in proto.graph.initializer}
    alias: dict[str, str] = {}
    layers, factor = list[_Layer](), 0.0
    for number, node in enumerate(proto.graph.node):
        given = [alias.get(name, name) for name in node.input]
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        if node.op_type == "Constant":
            values[node.output[0]] = onnx.numpy_helper.to_array(attributes["value"])
        elif node.op_type in ("Identity", "Cast", "Dropout"):
            alias[node.output[0]] = given[0]
        elif node.op_type == "Mul" and number < 8:  # where InsightFace's loader looks for it
            factor = float(values[given[1]].item())
        elif node.op_type in _LAYERS:
            parts = [torch.from_numpy(values[name].astype(np.float32)) for name in given[1:] if name in values]
            kind = _LAYERS[node.op_type]
            if kind == "Gemm" and parts and not attributes.get("transB"):
                parts[0] = parts[0].T.contiguous()
            parts = [part.flatten() for part in parts] if kind == "PRelu" else parts
            layers.append(_Layer(kind, given[0], node.output[0], parts, attributes.get("epsilon", 1e-5)))
    return layers, factor


def _matched(layers: list[_Layer], network: Network) -> tuple[dict[str, Tensor], int]:
    """Returns (the layers' weights under the network's names, the number of folded batch norms); empty for another."""
    left, found, num_folded = [*layers], dict[str, Tensor](), 0
    before: _Layer | None = None  # the convolution or linear layer directly before
    module = network.build("meta")
    for name, part in module.named_modules():
        kinds = {nn.Conv2d: "Conv", nn.Linear: "Gemm", nn.PReLU: "PRelu", _BatchNorm: "BN"}
        kind = next((kind for cls, kind in kinds.items() if isinstance(part, cls)), None)
        if kind is None:
            continue
        shape, source = part.weight.shape, before.output if before and kind == "BN" else None
        fitting = (one for one in left if one.kind == kind and one.values and one.values[0].shape == shape)
        layer = next((one for one in fitting if source in (None, one.source)), None)
        if layer is not None:
            left.remove(layer)
        elif kind != "BN" or before is None:
            return {}, 0
        if kind == "BN":
            taken = identity_norm(len(part.weight))
            bias = before.values[1] if before and len(before.values) > 1 else taken["bias"]
            if layer is None:
                num_folded, taken["bias"] = num_folded + 1, bias
            else:
                taken |= zip(("weight", "bias", "running_mean", "running_var"), layer.values, strict=False)
                taken["running_mean"] = taken["running_mean"] - bias
                taken["running_var"] = taken["running_var"] + layer.epsilon - part.eps
            before = None
        else:
            assert layer is not None
            taken = dict(zip([key for key, _ in part.named_parameters()], layer.values, strict=False))
            before = layer._replace(values=layer.values[:1] if "bias" in taken else layer.values)
            before = None if kind == "PRelu" else before
        found |= {f"{name}.{key}": t.clone() for key, t in taken.items()}
    expected = {name: t.shape for name, t in module.state_dict().items()}
    return ({}, 0) if left or {name: t.shape for name, t in found.items()} != expected else (found, num_folded)


@torch.no_grad()
def _difference(weights: dict[str, Tensor], network: Network, path: Path, batch: int, takes_pixels: bool) -> float:
    """Returns the largest difference of the features of two random images, as a part of the largest feature."""
    session = session_of(path)
    module = network.build("meta")
    module.load_state_dict(weights, assign=True)
    shape = 2, 3, network.image_size, network.image_size
    image_2 = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    parts = (image_2.float() if takes_pixels else FACE(image_2)).split(1 if batch == 1 else 2)
    name = session.get_inputs()[0].name
    theirs_2 = torch.from_numpy(np.concatenate([session.run(None, {name: part.numpy()})[0] for part in parts]))
    return ((module(FACE(image_2)) - theirs_2).abs().max() / theirs_2.abs().max()).item()
