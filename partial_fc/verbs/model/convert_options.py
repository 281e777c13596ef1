"""The flags of `partial-fc convert`, `checkpoint import` and `checkpoint export`, without torch, so that help and
mistakes cost no seconds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from partial_fc.flags.numbers import CLASSES, PIXELS, PROCESSES, check_numbers


@dataclass(frozen=True)
class ConvertOptions:
    """Moves a backbone (r18 to r200, tiny, mini) between MXNet's .params, this trainer's model.safetensors and
    arcface_torch's model.pt; the names of the files say from where to where. Embeddings stay the same: random images
    are embedded before and after, and nothing is written where they differ."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """PREFIX-0000.params, X.safetensors (also a checkpoint's backbone.safetensors), X.pt or X.pth (also
    checkpoint_gpu_R.pt)."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The same. Beside PREFIX-0000.params PREFIX-symbol.json is written."""
    symbol: Path | None = None
    """The symbol of a SOURCE of MXNet, which says its input's scale, epsilons and fixed gammas; none:
    PREFIX-symbol.json beside it, else what InsightFace's recipe has."""
    image_size: int | None = None
    """That the network is for, where several fit its shapes; none: what SOURCE says, else the largest (112 for 97 to
    112)."""

    def __post_init__(self) -> None:
        check_numbers(self, image_size=PIXELS)


_NETWORK = Literal["r18", "r34", "r50", "r100", "r200", "mbf"]


@dataclass(frozen=True)
class ImportOptions:
    """Joins class centres that InsightFace's trainers wrote, a file for each rank, into a checkpoint that any number of
    ranks loads. With the backbone (--network), --resume OUT goes on from it; without, train.py face takes the centres
    with --head-centres OUT, and the backbone with --pretrained."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")]
    """Those of all ranks, or the folder that they are in: R_centers.param and R_centers_mom.param (MXNet);
    checkpoint_gpu_R.pt, softmax_fc_gpu_R.pt, or rank_R_softmax_weight.pt and rank_R_softmax_weight_mom.pt
    (arcface_torch)."""
    out: Path
    """The new checkpoint's folder."""
    num_classes: int | None = None
    """For MXNet's files, whose last ones may end with padding."""
    names_file: Path | None = None
    """What the classes are called, one name a line."""
    network: _NETWORK | None = None
    """Which network checkpoint_gpu_0.pt, or --backbone, holds; none: the backbone is left out."""
    backbone: Path | None = None
    """Its weights, where they are in a file of their own (model.pt, backbone.pth)."""
    image_size: int = 112
    """That it was trained with."""
    optimizer: Literal["auto", "sgd", "adamw", "adam", "adagrad"] = "auto"
    """Optimizer of the centres, in the training that goes on. auto: what the files have the state of, else sgd."""
    momentum_lr: float | None = None
    """For R_centers_mom.param: the learning rate of the last steps."""
    step: int = 0
    """Where training goes on with --resume: so many updates are made."""
    position: int = 0
    """And so many samples were seen."""

    def __post_init__(self) -> None:
        check_numbers(self, num_classes=CLASSES, image_size=PIXELS, momentum_lr="(0, inf)")


@dataclass(frozen=True)
class ExportOptions:
    """Writes the class centres of a checkpoint as InsightFace's MXNet trainer does: R_centers.param, one for each of
    its ranks, and R_centers_mom.param where --momentum-lr is given. The backbone goes by `partial-fc convert`."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """A checkpoint, or a folder whose newest counts; several where each host has written into a folder of its own."""
    out: Path
    """The folder to write to (that trainer's --models-root)."""
    world_size: int
    """Ranks that the files are for."""
    momentum_lr: float | None = None
    """The learning rate of the last steps, which momentum of MXNet holds; none: no momentum is written."""

    def __post_init__(self) -> None:
        check_numbers(self, world_size=PROCESSES, momentum_lr="(0, inf)")
