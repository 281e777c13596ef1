"""Backbones: normalised image_B3HW -> feat_BD. Architecture only; `build` makes one by name."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from partial_fc.models import encoders, iresnet, vectors, vit
from partial_fc.models.mobilefacenet import Bottleneck, MobileFaceNet

NAMES = (*iresnet.DEPTHS, "mbf", *iresnet.SMALL, *vit.SIZES)
SMALLEST_IMAGE = 16  # pixels: halved four times, one is left
BLOCKS = (iresnet.Block, Bottleneck, vit.Block)  # the units of activation checkpointing


def build(
    name: str, embedding_size: int = 512, image_size: int = 112, in_channels: int = 3, dropout: float = 0.0
) -> nn.Module:
    """Builds a fresh backbone for square images of image_size pixels, with weights from torch's global generator.

    name: one of NAMES (tiny and mini are for 40 pixels on a CPU), timm:NAME, FILE.py:FUNCTION, whose code is executed
    (encoders.py), or a network of vectors (vectors.py), of image_size numbers. Its forward takes the output of
    `encoders.input_of(module)`, which is `inputs.FACE` for NAMES, and returns features, fp32 also under autocast.
    dropout: before the last linear layer. Raises ValueError for invalid values.
    """
    if encoders.is_encoder(name):
        return encoders.build(name, embedding_size, image_size, dropout)
    if vectors.is_of_vectors(name):
        return vectors.build(name, embedding_size, image_size)
    if name not in NAMES:
        raise ValueError(f"unknown network {name!r}, expected one of {', '.join(NAMES)}")
    if embedding_size < 1 or in_channels < 1:
        raise ValueError(f"embedding size {embedding_size} and channels {in_channels} must be 1 or more")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}, expected 0 or more and less than 1")
    if image_size < SMALLEST_IMAGE:
        raise ValueError(
            f"image size {image_size} is too small for {name}: expected at least {SMALLEST_IMAGE} pixels; "
            "any size from there on fits, odd ones too"
        )
    if name == "mbf":
        return MobileFaceNet(embedding_size, image_size, in_channels, dropout)
    if name in vit.SIZES:
        return vit.VisionTransformer(vit.SIZES[name], embedding_size, image_size, in_channels, dropout)
    return iresnet.build(name, embedding_size, image_size, in_channels, dropout)


def keeps_fp32(model: nn.Module) -> set[nn.Module]:
    """Returns the layers whose parameters stay fp32 when others become 16-bit (O2): all batch norms, whose
    small variances do not fit 16 bits; and those in KEEPS_FP32, after which forward computes in fp32."""
    kept: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            kept.add(module)
        for name in getattr(module, "KEEPS_FP32", ()):
            kept.update(module.get_submodule(name).modules())
    return kept
