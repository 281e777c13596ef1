"""IR networks of face.evoLVe, AdaFace and their kin as our iresnet: other names, and three differences.

    shortcut of equal width   MaxPool2d(1, stride), every stride-th pixel: here a 1x1 convolution that is the identity
    face.evoLVe's block       has no batch norm after its first convolution: here one that changes nothing
    AdaFace's pixels          are blue, green, red: the first convolution's input channels are turned round

Layouts: face.evoLVe's model_irse.py, AdaFace's net.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

_ENDS = {"input_layer.0": "conv1", "input_layer.1": "bn1", "input_layer.2": "prelu"}
_ENDS |= {"output_layer.0": "bn2", "output_layer.3": "fc", "output_layer.4": "features"}
_BLOCK = re.compile(r"body\.(\d+)\.(?:res_layer|(shortcut)_layer)\.(\d+)\.(.+)")
# By the number of layers in res_layer.
_LAYERS = {6: ("bn1", "conv1", "bn2", "prelu", "conv2", "bn3"), 5: ("bn1", "conv1", "prelu", "conv2", "bn3")}


def identity_norm(channels: int) -> dict[str, Tensor]:
    """Returns the tensors of a batch norm that changes nothing in evaluation."""
    state = nn.BatchNorm2d(channels).state_dict()
    return state | {"running_var": state["running_var"] - nn.BatchNorm2d(1).eps}


def to_iresnet(weights: Mapping[str, Tensor], path: Path, bgr: bool) -> dict[str, Tensor]:
    """Returns the weights under our names, of a network that takes red, green, blue. bgr: theirs takes blue first.
    Raises ValueError for blocks of another kind."""
    found: dict[str, Tensor] = {}
    blocks: dict[int, dict[tuple[bool, int, str], Tensor]] = {}  # (of the shortcut, number, name)
    for name, t in weights.items():
        layer, _, last = name.rpartition(".")
        if match := _BLOCK.fullmatch(name):
            blocks.setdefault(int(match[1]), {})[bool(match[2]), int(match[3]), match[4]] = t
        else:
            found[f"{_ENDS.get(layer, layer)}.{last}"] = t
    width, stage, number = 0, 0, 0
    for body, block in sorted(blocks.items()):
        size = len({layer for is_shortcut, layer, _ in block if not is_shortcut})
        last_conv = block.get((False, size - 2, "weight"))
        if any(name.startswith("fc") for _, _, name in block):
            raise ValueError(f"{path} has squeeze-and-excitation (IR-SE) blocks; the networks here have none")
        if size not in _LAYERS or last_conv is None:
            raise ValueError(
                f"{path}: body.{body} has {size} layers; expected the 5 or 6 of IR-18, 34, 50 and 101 (BN, conv 3x3, "
                "PReLU, conv 3x3, BN); IR-152 and IR-200 have bottlenecks, which no network here has"
            )
        stage, number = (stage, number + 1) if len(last_conv) == width else (stage + 1, 0)
        width, to = len(last_conv), f"layer{stage}.{number}"
        if size == 5:
            found |= {f"{to}.bn2.{name}": t for name, t in identity_norm(width).items()}
        if number == 0 and (True, 0, "weight") not in block:
            found[f"{to}.downsample.0.weight"] = torch.eye(width).view(width, width, 1, 1)
            found |= {f"{to}.downsample.1.{name}": t for name, t in identity_norm(width).items()}
        for (is_shortcut, at, name), t in block.items():
            found[f"{to}.downsample.{at}.{name}" if is_shortcut else f"{to}.{_LAYERS[size][at]}.{name}"] = t
    # Without weight and bias if the last batch norm is not affine.
    found = {f"features.{name}": t for name, t in identity_norm(len(found["fc.weight"])).items()} | found
    return {name: t.flip(1) if bgr and name == "conv1.weight" else t for name, t in found.items()}


def are_in(weights: Mapping[str, Tensor]) -> bool:
    """Tells whether the names are of such a network."""
    return {"input_layer.0.weight", "output_layer.3.weight"} <= weights.keys() and any(map(_BLOCK.fullmatch, weights))
