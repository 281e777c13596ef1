"""Training-time augmentation of one decoded image: (image_HWC uint8, rng) -> an image of the same shape.

The loader hands over a generator that is a function of (seed, position), so an image is changed alike
whatever thread or rank reads it. cv2 and numpy only, no threads: the loader has its own.
"""

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]


def mirror(image_HWC: Image, rng: np.random.Generator) -> Image:
    """Left and right exchanged, every second time."""
    return np.ascontiguousarray(image_HWC[:, ::-1]) if rng.random() < 0.5 else image_HWC
