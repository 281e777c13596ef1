"""A trained backbone as ONNX, by torch.onnx, also in fp16, compared in onnxruntime.

I images of a batch, D feature width.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from partial_fc import __version__
from partial_fc.embedding.model import EmbeddingModel
from partial_fc.errors import package
from partial_fc.foreign.onnx_file import session_of
from partial_fc.models.inputs import FACE, InputContract, Pixels

INPUT, OUTPUT = "input", "embedding"
# Of ONNX 1.13. Runtimes refuse files of a later format: onnxruntime 1.14, of early 2023, reads these.
_OPSET, _IR_VERSION = 18, 8
_PIXELS = "float32 (N, 3, H, W), RGB, pixel, 0 to 255"


class _FromPixels(nn.Module):
    """A network with its input contract included: it takes RGB pixels as float32."""

    mean: Tensor
    scale: Tensor

    def __init__(self, network: nn.Module, contract: Pixels):
        super().__init__()
        self.network = network
        self.bgr = contract.bgr
        mean, std = (torch.tensor(x).expand(3).view(3, 1, 1) for x in (contract.mean, contract.std))
        # The contract's numbers are in the network's order, the pixels are red, green, blue.
        self.register_buffer("mean", mean.flip(0) if self.bgr else mean.clone(), persistent=False)
        self.register_buffer("scale", 1 / (std.flip(0) if self.bgr else std), persistent=False)

    def forward(self, pixel_I3HW: Tensor) -> Tensor:
        # Subtraction and multiplication first: by these two nodes InsightFace's loader recognises pixel input.
        values = (pixel_I3HW - self.mean) * self.scale
        return self.network(values.flip(1) if self.bgr else values)


def takes_pixels(contract: InputContract) -> TypeGuard[Pixels]:
    """Tells whether the exported network takes pixels, 0 to 255. InsightFace's ArcFaceONNX feeds (pixel - 127.5) /
    127.5 to a network without subtraction and multiplication in its first eight nodes, and pixels to others."""
    of_face = FACE.mean, FACE.std, FACE.bgr
    return isinstance(contract, Pixels) and (contract.mean, contract.std, contract.bgr) != of_face


def write(model: EmbeddingModel, path: Path) -> None:
    """Writes the network: input "input" float32 (N, 3, H, W), or (N, size) for vectors, with any N, output "embedding"
    (N, D), not normalised; the model's facts in metadata_props. Raises ValueError if a package is missing."""
    onnx = package("onnx", "ONNX", "export")
    package("onnxscript", "ONNX", "export")
    contract: InputContract = model.to_input
    pixels = takes_pixels(contract)
    network = _FromPixels(model.network, contract).eval() if takes_pixels(contract) else model.network
    example = torch.from_numpy(to_array(model.examples(2), contract))
    with _quiet():
        program = torch.onnx.export(
            network,
            (example,),
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: torch.export.Dim("N")},),
            opset_version=_OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    if pixels:
        for node in list(proto.graph.node)[:8]:  # that scale the pixels: InsightFace's loader knows nodes by name
            if node.op_type in ("Sub", "Mul"):
                node.name = f"{node.op_type}_{node.name}"
    del proto.metadata_props[:]
    taken = Pixels(_PIXELS, 0.0, 1.0) if pixels else contract
    onnx.helper.set_model_props(proto, {**model.facts(), **taken.facts()})
    proto.producer_name, proto.producer_version = "partial-fc", __version__
    _save(proto, path)


def _save(proto: Any, path: Path) -> None:
    """Saves a model in the file format of _OPSET, without what later formats added: nodes in the order of computation,
    and no operator sets but those that nodes are of. Raises ValueError if it is no valid ONNX."""
    onnx = package("onnx", "ONNX", "export")
    proto.ir_version = _IR_VERSION
    used = {node.domain for part in (proto.graph, *proto.functions) for node in part.node}
    kept = [opset for opset in proto.opset_import if opset.domain in used]
    del proto.opset_import[:]
    proto.opset_import.extend(kept)
    given = {each.name for each in proto.graph.input}
    proto.graph.node.sort(key=lambda node: not set(node.input) <= given)  # fp16: the input's Cast comes last
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ValueError(f"{path} is not written: onnx.checker says: {str(error)[:500]}") from error
    onnx.save(proto, str(path))


def write_fp16(source: Path, path: Path) -> None:
    """Writes it with float16 weights and arithmetic; input and output stay float32."""
    onnx = package("onnx", "ONNX", "export")
    package("onnxruntime", "ONNX", "export")
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with _quiet():
        proto = convert_float_to_float16(onnx.load(str(source)), keep_io_types=True)
    for node in proto.graph.node:  # onnxruntime 1.14 crashes at a Relu in fp16 on a CPU
        if node.op_type == "Relu":
            node.op_type = "LeakyRelu"
            node.attribute.append(onnx.helper.make_attribute("alpha", 0.0))
    _save(proto, path)


def forward_of(path: Path, contract: InputContract) -> Callable[[Tensor], Tensor]:
    """Returns a function of uint8 RGB images (I, 3, H, W) -> features (I, D), computed by onnxruntime on the CPU."""
    session = session_of(path)

    def forward(image_I3HW: Tensor) -> Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: to_array(image_I3HW, contract)})[0])

    return forward


def to_array(image_I3HW: Tensor, contract: InputContract) -> NDArray[np.float32]:
    """Converts uint8 images, or vectors, to the exported network's input."""
    values = image_I3HW.float() if takes_pixels(contract) else contract(image_I3HW)
    return values.contiguous().numpy()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporter's messages for developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
