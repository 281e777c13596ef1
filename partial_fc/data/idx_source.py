"""MNIST's files as a Source: pixels in memory, (H, W, 1) uint8."""

from collections.abc import Sequence
from pathlib import Path

from numpy.typing import NDArray

from partial_fc.data.idx import Split, read_set
from partial_fc.data.sample import Sample


class IdxSource:
    """One of the two sets of a folder. Raises ValueError as `idx.read_set` does."""

    def __init__(self, folder: Path, split: Split, num_classes: int = 10):
        self.image_NHW, self.label_N = read_set(folder, split, num_classes)
        self._where = f"{folder} ({split})"
        self._num_classes = num_classes

    @property
    def num_classes(self) -> int:
        return self._num_classes

    def __len__(self) -> int:
        return len(self.label_N)

    def read(self, index: int) -> Sample:
        return Sample(self.image_NHW[index][..., None], int(self.label_N[index]), index)

    def where(self, index: int) -> str:
        return f"{self._where}, image {index}"

    def will_need(self, indices: Sequence[int]) -> None:
        """All is in memory."""

    def labels(self) -> NDArray:
        return self.label_N

    def class_names(self) -> None:
        """None: they are no more than numbers."""
