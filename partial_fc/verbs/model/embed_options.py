"""The flags of `partial-fc embed` and `classify`, without torch, so that help and mistakes cost no seconds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from partial_fc.flags import Flags, LaunchFlags, check_numbers
from partial_fc.flags.numbers import BATCH, PIXELS, THREADS
from partial_fc.verbs.model.table import check_table


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """Embeds images with a trained model: a table of keys, labels and embeddings of length 1, in the images' order. On
    all ranks of horovodrun, torchrun and so on, or of --gpus; the table is the same for any number of them (to the bit,
    with as many threads each)."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's folder, a checkpoint, model.safetensors, or arcface_torch's model.pt, backbone.pth, checkpoint_gpu_0.pt
    """
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES...")]
    """A folder of images or of class folders, a .rec (or its folder), a list (a path, or `path label`, a line), or
    image files."""
    out: Path
    """The table: .npz (keys, labels, embeddings) or .parquet (key, label, embedding). A .rec's keys are its numbers."""
    image_size: int | None = None
    """Of models whose file does not say it; none: the largest that its weights fit."""
    flip: bool | None = None
    """Add the embedding of the mirrored image; none: as the model says."""
    on_bad: Literal["stop", "nan"] = "stop"
    """What to do with an image that cannot be used: end without a table, or write NaN and name it."""
    batch_size: int = 64
    """Images of one call of the network."""
    num_workers: int = 2
    """Decoding threads of each process."""
    launch: Flags[LaunchFlags] = field(default_factory=LaunchFlags)

    def __post_init__(self) -> None:
        check_numbers(self, image_size=PIXELS, batch_size=BATCH, num_workers=THREADS)
        if not self.images:
            raise ValueError("IMAGES is missing: a folder, a .rec, a list, or image files")
        check_table(self.out)


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """Prints, for each image, the classes whose centres are nearest to its embedding, with names and cosines: what the
    training would take it for. A class that no step has touched has no place yet, and is not asked."""

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A run's folder, whose newest checkpoint counts, or a checkpoint's. (model.safetensors has no class centres.)"""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES...")]
    """Image files; or a folder, a list or a .rec."""
    top: int = 5
    """Classes for each image."""
    flip: bool | None = None
    """Add the embedding of the mirrored image; none: as the checkpoint says."""
    device: str = "auto"
    """cpu, cuda, or auto: a GPU where there is one."""

    def __post_init__(self) -> None:
        check_numbers(self, top=1)
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--device is {self.device!r}; expected auto, cpu or cuda")
