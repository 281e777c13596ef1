"""Recipe `face` on vectors instead of images (docs/vectors.md): what differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partial_fc.flags import flag, is_given

if TYPE_CHECKING:
    from partial_fc.data import Source
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
    if not data.recs or data.synthetic or any(rec.suffix not in (*SUFFIXES, ".sets") for rec in data.recs):
        what = f"--rec {data.shown}" if data.recs else f"--dataset {data.dataset}"
        raise ValueError(f"--network {network} takes vectors, .npz, .npy or .parquet; this run has {what}")
    for name in ("image_size", "mirror", "augment", "order"):
        if is_given(data, name):
            raise ValueError(f"{flag(name)} with --network {network}: it is about images; leave it out")
    for name in ("ema", "lora", "teacher") if network == "none" else ("lora",):
        if is_given(tuning, name):
            raise ValueError(f"{flag(name)} with --network {network}: it has no such layers; leave it out")


def open_tables(data: DataFlags) -> Source:
    """Opens the vectors of --rec. Raises ValueError for unusable files, and for images."""
    from partial_fc.data.sets.joined import open_sets, parts_of, tables_of

    source = open_sets(data.recs, data.num_classes, data.shared_classes, vectors=True, num_labels=data.labels)
    if not tables_of(source):
        raise ValueError(
            f"{parts_of(source)[0].where(0)}: an image; with --network none, linear and mlp expected vectors"
        )
    return source


def evaluations(data: DataFlags, source: Source, num_classes: int, head: PartialFC) -> list[NearestClass]:
    """Returns those of --val-targets. Raises ValueError for unusable files."""
    from partial_fc.data.sets.joined import tables_of
    from partial_fc.data.vectors import Vectors
    from partial_fc.evaluate.classification import NearestClass

    rec = tables_of(source)[0].path
    paths = [Path(t) if t.endswith(SUFFIXES) else rec.with_name(t + rec.suffix) for t in data.val_targets or ()]
    return [NearestClass(path.stem, Vectors(path, num_classes, data.labels), head) for path in paths]
