"""Synthetic data: training without reading images, to find out whether input is the bottleneck."""

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.sample import Sample, Source


class Synthetic(Source):
    """One random image for every sample; sample i has label i % num_classes.

    The loader's keyed permutation shuffles the labels, so they need no randomness of their own, and every class occurs.
    100 million classes need no more memory than ten.
    """

    def __init__(self, num_classes: int, image_size: int = 112, num_samples: int | None = None) -> None:
        self.num_classes = num_classes
        self._num_samples = num_samples or num_classes
        self._image = np.random.default_rng(0).integers(0, 256, (image_size, image_size, 3), np.uint8)

    def __len__(self) -> int:
        return self._num_samples

    def read(self, index: int) -> Sample:
        return Sample(self._image, index % self.num_classes, index)

    def where(self, index: int) -> str:
        return f"synthetic sample {index}"

    def labels(self) -> NDArray[np.int64]:
        return np.arange(self._num_samples) % self.num_classes
