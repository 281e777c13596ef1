"""The flags of `partial-fc evaluate` and `search`, without torch, so that help and mistakes cost no seconds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from partial_fc.flags import Flags, LaunchFlags, check_numbers
from partial_fc.flags.numbers import PIXELS


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Measures a model on pairs of images: accuracy, TAR at FAR, the threshold to use and what it gives. Writes
    evaluation.json, roc.png, similarities.png and the worst pairs of each set."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's folder, model.safetensors, a checkpoint, or arcface_torch's model.pt."""
    sets: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[SET ...]")] = ()
    """Pairs: InsightFace's .bin, or a CSV file with `path,path,same` or `path,path,different` a line."""
    root: Path | None = None
    """What the paths of CSV files are relative to; each file's own folder if not given."""
    ijb: Path | None = None
    """The folder of IJB-B or IJB-C (meta, loose_crop), as InsightFace publishes it: 1:1, and 1:N where its lists are
    there."""
    target: Literal["IJBB", "IJBC"] = "IJBC"
    """Which of the two --ijb is."""
    detector_score: bool = True
    """--ijb: weigh an image by the score of the face detector."""
    feature_length: bool = True
    """--ijb: weigh an image by the length of its feature. (Both as InsightFace's table has it.)"""
    image_size: int | None = None
    """Of models whose file does not say it; none: the largest that its weights fit."""
    flip: bool | None = None
    """Add the embedding of the mirrored image; none: as the model says."""
    batch_size: int = 128
    """Images of one call of the network."""
    show: int = 10
    """How many pairs of each kind the picture of the worst has; 0: no picture."""
    out: Path | None = None
    """Where to write; `evaluation` in the run's folder, or beside the model's file, if not given."""
    launch: Flags[LaunchFlags] = field(default_factory=LaunchFlags)

    def __post_init__(self) -> None:
        check_numbers(self, image_size=PIXELS, batch_size=2, show=0)
        if not self.sets and self.ijb is None:
            raise ValueError("nothing to evaluate on: give a .bin, a CSV file of pairs, or --ijb DIR")
        names = [path.stem for path in self.sets] + ([self.target] if self.ijb else [])
        if len(set(names)) < len(names):
            raise ValueError(
                f"two sets of one name among {', '.join(names)}: their results would be mixed up; rename one"
            )
        for path in (*self.sets, *([self.ijb] if self.ijb else [])):
            if not path.exists():
                raise ValueError(f"{path} not found; expected a .bin or .csv of pairs, or --ijb DIR")
        for path in self.sets:
            if path.suffix not in (".bin", ".csv", ".tsv"):
                raise ValueError(f"{path}: expected a .bin of pairs, or a .csv (or .tsv) that names them")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Searches each image of --probe among those of --gallery: rank-1, rank-5, TPIR at FPIR (probes whose class is not
    in the gallery), P@1 and mAP@R. Writes search.json, and neighbours.png where there are images."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run's folder, model.safetensors, a checkpoint, or arcface_torch's model.pt."""
    gallery: Path
    """Who is known: a folder of class folders, a .rec, a list, or an .npz that `partial-fc embed` wrote."""
    probe: Path | None = None
    """Who is searched, likewise; if not given, each image of the gallery is searched among the others."""
    image_size: int | None = None
    """Of models whose file does not say it; none: the largest that its weights fit."""
    flip: bool | None = None
    """Add the embedding of the mirrored image; none: as the model says."""
    batch_size: int = 128
    """Images of one call of the network."""
    out: Path | None = None
    """Where to write; `search` in the run's folder, or beside the model's file, if not given."""
    launch: Flags[LaunchFlags] = field(default_factory=LaunchFlags)

    def __post_init__(self) -> None:
        check_numbers(self, image_size=PIXELS, batch_size=1)
        if self.probe == self.gallery:
            raise ValueError("--probe is --gallery: leave --probe away, and each image is searched among the others")
