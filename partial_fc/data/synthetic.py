"""Synthetic data: training without reading images, to find out whether input is the bottleneck."""

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.sample import Sample, Source


class Synthetic(Source):
    """One random image for every sample; sample i has label i % num_classes, and further ones evenly spread over the
    classes.

    The loader's keyed permutation shuffles the labels, so they need no randomness of their own, and every class occurs.
    100 million classes need no more memory than ten.
    """

    def __init__(
        self, num_classes: int, image_size: int = 112, num_samples: int | None = None, num_labels: int = 1
    ) -> None:
        self.num_classes, self.num_labels = num_classes, num_labels
        self._after = np.arange(1, num_labels) * max(1, num_classes // num_labels)
        self._num_samples = num_samples or num_classes
        self._image = np.random.default_rng(0).integers(0, 256, (image_size, image_size, 3), np.uint8)

    def __len__(self) -> int:
        return self._num_samples

    def read(self, index: int) -> Sample:
        more = ((index + self._after) % self.num_classes).tolist() if self.num_labels > 1 else ()
        return Sample(self._image, index % self.num_classes, index, tuple(more))

    def where(self, index: int) -> str:
        return f"synthetic sample {index}"

    def labels(self) -> NDArray[np.int64]:
        index_N = np.arange(self._num_samples)
        if self.num_labels > 1:
            return (index_N[:, None] + np.append(0, self._after)) % self.num_classes
        return index_N % self.num_classes
