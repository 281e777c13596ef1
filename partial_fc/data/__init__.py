"""Data input: a source for each file format, transforms, and one Loader for all of them."""

from typing import TYPE_CHECKING

from partial_fc.data.image_folder import ImageFolder
from partial_fc.data.open import open_on_all, open_source
from partial_fc.data.recordio import RecordSource
from partial_fc.data.sample import BadRecord, Sample, Source, Synthetic
from partial_fc.on_demand import on_demand

if TYPE_CHECKING:
    from partial_fc.data.loader import Batch, Loader
    from partial_fc.data.transform import SquareImage

__all__ = [
    *("BadRecord", "Batch", "ImageFolder", "Loader", "RecordSource", "Sample", "Source", "SquareImage", "Synthetic"),
    *("open_on_all", "open_source"),
]
__getattr__ = on_demand(__name__, {"Batch": "loader", "Loader": "loader", "SquareImage": "transform"})
