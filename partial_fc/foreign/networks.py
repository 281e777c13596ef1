"""Recognition of a network by the names and shapes of its weights, for files that do not state it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from partial_fc import models
from partial_fc.models import encoders, iresnet, vit
from partial_fc.printable import some

DEPTHS = {**iresnet.DEPTHS, **{name: depths for name, (depths, _) in iresnet.SMALL.items()}}
_BLOCK = re.compile(r"(?:layer(\d+)\.\d+\.conv1\.weight|arg:stage(\d+)_unit\d+_conv1_weight)")
_FC = ("fc.weight", "arg:pre_fc1_weight")
# MobileFaceNet's last convolution, as large as its map, and its linear layer.
_MBF = ("features.layers.0.layers.0.weight", "features.layers.2.weight")
_VIT = ("patch_embed.proj.weight", "pos_embed", "feature.2.weight")


@dataclass(frozen=True)
class Network:
    """A network. name: as in --network; of a FILE.py:FUNCTION without the folder, which is `folder`."""

    name: str
    embedding_size: int
    image_size: int
    folder: Path | None = None

    def __str__(self) -> str:
        return f"{self.name} with --embedding-size {self.embedding_size} and --image-size {self.image_size}"

    def build(self, device: str = "cpu") -> nn.Module:
        """Builds it with fresh weights, in evaluation mode; torch's generator stays. device: "meta" if shapes suffice;
        an encoder is built on the CPU all the same, as it may have buffers that no file has."""
        name = self.name if self.folder is None else str(self.folder / self.name)
        with torch.random.fork_rng(devices=[]), torch.device("cpu" if encoders.is_encoder(name) else device):
            return models.build(name, self.embedding_size, self.image_size).eval()


def network_of(arrays: Mapping[str, Tensor], path: Path, image_size: int | None = None) -> Network:
    """Returns the network with these names and shapes. arrays: under our names or MXNet's, from `path`. image_size:
    None: the largest that fits. Raises ValueError for another network; does not check that all arrays match."""
    if _MBF[0] in arrays:
        last, linear = (arrays.get(name) for name in _MBF)
        if last is None or linear is None or last.dim() != 4 or linear.dim() != 2:
            raise ValueError(f"{path} is no MobileFaceNet that is known here: {' and '.join(_MBF)} do not fit one")
        return Network("mbf", len(linear), image_size or max(models.SMALLEST_IMAGE, last.shape[3] << 4))
    if _VIT[0] in arrays and "feature.0.weight" in arrays:
        return _vision_transformer(arrays, path, image_size)
    counts: dict[int, int] = {}
    for match in filter(None, map(_BLOCK.fullmatch, arrays)):
        stage = int(match[1] or match[2])
        counts[stage] = counts.get(stage, 0) + 1
    depths = tuple(counts[stage] for stage in sorted(counts))
    name = next((name for name, known in DEPTHS.items() if known == depths), None)
    if name is None:
        known = ", ".join(f"{name} {'-'.join(map(str, d))}" for name, d in DEPTHS.items())
        found = f"stages of {'-'.join(map(str, depths))} blocks" if depths else f"names like {some(list(arrays))}"
        raise ValueError(
            f"{path} is no network that is known here: {found}; expected the blocks of {known}, a MobileFaceNet, or "
            "arcface_torch's vision transformers"
        )
    fc_DI = next((arrays[name] for name in _FC if name in arrays), None)
    if fc_DI is None or fc_DI.dim() != 2:
        raise ValueError(f"{path} has no {' or '.join(_FC)}: expected a network with InsightFace's output 'FC' or 'E'")
    if image_size is None:
        width, halvings = (128, 3) if name in iresnet.SMALL else (512, 4)
        image_size = max(models.SMALLEST_IMAGE, math.isqrt(fc_DI.shape[1] // width) << halvings)
    return Network(name, len(fc_DI), image_size)


def _vision_transformer(arrays: Mapping[str, Tensor], path: Path, image_size: int | None) -> Network:
    patch_D3pp, place_1LD, last_ED = (arrays.get(name) for name in _VIT)
    depth = len({name.split(".")[1] for name in arrays if name.startswith("blocks.")})
    if patch_D3pp is None or place_1LD is None or last_ED is None or (place_1LD.dim(), last_ED.dim()) != (3, 2):
        raise ValueError(f"{path} is no vision transformer that is known here: {', '.join(_VIT)} do not fit one")
    # Variants of a size differ in training only: the first, without a suffix, stands for all.
    width = len(patch_D3pp)
    name = next((name for name, size in vit.SIZES.items() if (size.width, size.depth) == (width, depth)), None)
    if name is None:
        sizes = {name: size for name, size in vit.SIZES.items() if "_dp" not in name}
        known = ", ".join(f"{name} {size.width} x {size.depth}" for name, size in sizes.items())
        raise ValueError(f"{path} is a vision transformer of width {width} with {depth} blocks; expected {known}")
    if image_size is None:
        side, across = patch_D3pp.shape[-1], math.isqrt(place_1LD.shape[1])
        image_size = 112 if (side, across) == (9, 12) else max(models.SMALLEST_IMAGE, side * across)
    return Network(name, len(last_ED), image_size)
