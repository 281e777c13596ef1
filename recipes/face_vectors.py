"""Recipe `face` on vectors instead of images (docs/vectors.md): what differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partial_fc.flags import flag, is_given

if TYPE_CHECKING:
    from partial_fc.evaluate.classification import NearestClass
    from partial_fc.head import PartialFC

    from .face import DataFlags
    from .face_backbone import ModelFlags
    from .face_tuning import TuningFlags

SUFFIXES = (".npz", ".npy", ".parquet")


def check(data: DataFlags, model: ModelFlags, tuning: TuningFlags) -> None:
    """Raises ValueError for data that this network does not take, and for flags about images and larger networks."""
    network = model.network
    if not model.takes_vectors:
        if any(rec.suffix in (".npz", ".npy") for rec in data.recs):
            raise ValueError(f"--rec {data.shown} has vectors: add --network none, linear or mlp:512")
        return
    if len(data.recs) != 1 or data.recs[0].suffix not in SUFFIXES or data.synthetic:
        what = f"--rec {data.shown}" if data.recs else f"--dataset {data.dataset}"
        raise ValueError(f"--network {network} takes vectors, one .npz, .npy or .parquet; this run has {what}")
    for name in ("image_size", "mirror", "augment", "order"):
        if is_given(data, name):
            raise ValueError(f"{flag(name)} with --network {network}: it is about images; leave it out")
    for name in ("ema", "lora", "teacher") if network == "none" else ("lora",):
        if is_given(tuning, name):
            raise ValueError(f"{flag(name)} with --network {network}: it has no such layers; leave it out")


def evaluations(data: DataFlags, num_classes: int, head: PartialFC) -> list[NearestClass]:
    """Returns those of --val-targets. Raises ValueError for unusable files."""
    from partial_fc.data.vectors import Vectors
    from partial_fc.evaluate.classification import NearestClass

    rec = data.recs[0]
    paths = [Path(t) if t.endswith(SUFFIXES) else rec.with_name(t + rec.suffix) for t in data.val_targets or ()]
    return [NearestClass(path.stem, Vectors(path, num_classes, data.labels), head) for path in paths]
