"""Bytes to batches: one file a format, one Loader for all of them."""

from typing import TYPE_CHECKING, Any

from partial_fc.data.image_folder import ImageFolder
from partial_fc.data.open import open_on_all, open_source
from partial_fc.data.record_source import RecordSource
from partial_fc.data.sample import BadRecord, Sample, Source
from partial_fc.data.synthetic import Synthetic

if TYPE_CHECKING:
    from partial_fc.data.loader import Batch, Loader

__all__ = [
    "BadRecord",
    "Batch",
    "ImageFolder",
    "Loader",
    "RecordSource",
    "Sample",
    "Source",
    "Synthetic",
    "open_on_all",
    "open_source",
]


def __getattr__(name: str) -> Any:
    """Batch and Loader, which need torch, are imported when they are asked for: who only reads or writes data starts
    without the seconds that torch takes."""
    if name in ("Batch", "Loader"):
        from partial_fc.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
