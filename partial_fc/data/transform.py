"""Transforms of a Loader: (sample, rng, out) -> an array of one fixed shape, channels last. `out`, if given, is the
place in the batch; a transform may write there and then returns `out` itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from partial_fc.data.augment import FACE, PHOTO, glyph, window
from partial_fc.data.decode import check_proportions, decode, decode_into, fit
from partial_fc.data.sample import Sample, still

if TYPE_CHECKING:
    from torch import Tensor

Pixels = NDArray[np.uint8]
# May modify its image in place and return it.
Augment = Callable[[Pixels, np.random.Generator], Pixels]


@dataclass(frozen=True)
class SquareImage:
    """An image of `size` x `size` pixels: decoded, resized and centre-cropped if it has another size, then augmented
    (augment.py). uint8 (size, size, 3) RGB. Raises BadRecord for an image that cannot be decoded.

    random_area: instead of the whole image a random window (augment.window) of this share of its area or more."""

    size: int
    augment: Augment | None = None
    random_area: float = 1.0

    def __call__(self, sample: Sample, rng: np.random.Generator, out: Pixels | None = None) -> Pixels:
        given = still(sample)
        image = decode(given, out) if isinstance(given, bytes) else given
        if self.random_area < 1:
            part = image[window(image, rng.uniform(self.random_area, 1), rng)]
            shrinks = min(part.shape[:2]) >= self.size
            way = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
            image = np.asarray(cv2.resize(part, (self.size, self.size), interpolation=way), np.uint8)
        image = fit(image, self.size)
        if self.augment is None:
            return image
        return self.augment(image.copy() if image is given else image, rng)

    def place(self, samples: Sequence[Sample | None], outs: Sequence[Pixels]) -> list[bool]:
        """Decodes JPEGs of exactly this size (loader.Staged)."""
        if self.random_area < 1:
            return [False] * len(samples)
        return [
            sample is not None and isinstance(sample.data, bytes) and decode_into(sample.data, out)
            for sample, out in zip(samples, outs, strict=True)
        ]


AugmentName = Literal["none", "glyph", "face", "photo"]


def training_square(size: int, augment: AugmentName, mirrored: bool) -> SquareImage:
    """Returns recipe face's transform for training: --image-size, --augment and --mirror."""
    presets: dict[str, list[Augment]] = {"none": [], "glyph": [glyph], "face": [FACE], "photo": [PHOTO]}
    steps = [mirror] * mirrored + presets[augment]
    only = steps[0] if len(steps) == 1 else partial(_in_turn, steps)
    return SquareImage(size, only if steps else None, 0.35 if augment == "photo" else 1.0)


def _in_turn(steps: Sequence[Augment], image: Pixels, rng: np.random.Generator) -> Pixels:
    for step in steps:
        image = step(image, rng)
    return image


@dataclass(frozen=True)
class ShortSideCrop:
    """A crop of `crop` x `crop` pixels of an image whose shorter side is resized to `resize`: random, for training, or
    central; mirror: flip every second one. uint8 (crop, crop, 3) RGB; grey is expanded.

    The other side is truncated, INTER_AREA, smaller images are enlarged.
    """

    resize: int
    crop: int
    random: bool
    mirror: bool = False

    def __call__(self, sample: Sample, rng: np.random.Generator, out: Pixels | None = None) -> Pixels:
        given = still(sample)
        image = decode(given) if isinstance(given, bytes) else given
        check_proportions(image)
        image = short_side(image, self.resize)
        spare = (image.shape[0] - self.crop, image.shape[1] - self.crop)
        top, left = (rng.integers(0, n + 1) if self.random else n // 2 for n in spare)
        image = image[top : top + self.crop, left : left + self.crop]
        if self.mirror and rng.random() < 0.5:
            image = image[:, ::-1]
        return np.repeat(image.reshape(self.crop, self.crop, 1), 3, axis=2) if image.size == self.crop**2 else image


def short_side(image: Pixels, size: int) -> Pixels:
    """Resizes the shorter side to `size`, by INTER_AREA; the other one is rounded down."""
    height, width = image.shape[:2]
    shorter = min(height, width)
    if shorter == size:
        return image
    to = (width * size // shorter, height * size // shorter)
    resized = np.asarray(cv2.resize(image, to, interpolation=cv2.INTER_AREA), np.uint8)
    return resized.reshape(*resized.shape[:2], -1)  # OpenCV drops the axis of a single channel


def channels_first(array_B: "Tensor") -> "Tensor":
    """Views a batch of images or clips, (B, ..., C), as (B, C, ...), channels-last in memory. With a single channel the
    strides are contiguous: with the others torch's convolutions round several times as much. Leaves arrays of fewer
    dimensions (tokens, vectors, sequences of these) unchanged."""
    if array_B.ndim < 4:
        return array_B
    return array_B.squeeze(-1).unsqueeze(1) if array_B.shape[-1] == 1 else array_B.movedim(-1, 1)


def as_stored(sample: Sample, _rng: np.random.Generator, _out: NDArray | None = None) -> NDArray:
    """Returns the source's array unchanged, for sources of pixels or vectors (Source.read_batch)."""
    assert isinstance(sample.data, np.ndarray)
    return sample.data


def mirror(image_HWC: Pixels, rng: np.random.Generator) -> Pixels:
    """Flips every second image horizontally, in place."""
    if rng.random() < 0.5:
        cv2.flip(image_HWC, 1, dst=image_HWC)
    return image_HWC
