"""Bytes to batches: one file a format, one Loader for all of them."""

import os
from pathlib import Path

from partial_fc.data.image_folder import ImageFolder
from partial_fc.data.loader import Batch, Loader
from partial_fc.data.record_source import RecordSource
from partial_fc.data.sample import BadRecord, Sample, Source
from partial_fc.data.synthetic import Synthetic

__all__ = [
    "BadRecord",
    "Batch",
    "ImageFolder",
    "Loader",
    "RecordSource",
    "Sample",
    "Source",
    "Synthetic",
    "open_source",
]


def open_source(path: str | os.PathLike[str], num_classes: int | None = None) -> RecordSource | ImageFolder:
    """A folder with train.rec or a .rec file, a folder with one sub-folder per class, or a list of images."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} not found; expected a folder with train.rec, a folder of class folders, or a list")
    if path.suffix == ".rec" or (path / "train.rec").exists():
        return RecordSource(path, num_classes)
    if path.is_dir():
        return ImageFolder(path, num_classes=num_classes)
    return ImageFolder(list_file=path, num_classes=num_classes)
