"""Augmentation of character images, and the distortions that it shares with the renderer of the glyph set. cv2 and
numpy only; the loader has the threads."""

import math

import cv2
import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]


def glyph(image_HWC: Image, rng: np.random.Generator) -> Image:
    """Augments the image of a character; the same for all channels. Never mirrors: a mirrored character is another one.

    Rotates by up to 5 degrees, shears, scales by up to 10 %, shifts by up to 4 % of the width; changes contrast and
    brightness; blurs every second image; adds noise. Pixels from outside get the mean colour of the corners.
    """
    height, width = image_HWC.shape[:2]
    u = rng.random(9)
    source = affine(
        (height, width),
        (height, width),
        degrees=10 * u[0] - 5,
        slant=0.1 * u[1] - 0.05,
        scale=(0.9 + 0.2 * u[2], 0.9 + 0.2 * u[3]),
        move=(0.08 * width * (u[4] - 0.5), 0.08 * height * (u[5] - 0.5)),
    )
    corners = image_HWC[:: height - 1, :: width - 1].reshape(4, -1).mean(axis=0)
    out = cv2.warpAffine(
        image_HWC,
        source,
        (width, height),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderValue=tuple(corners.tolist()),
    ).reshape(image_HWC.shape)  # cv2 drops the axis of a single channel
    if u[6] < 0.5:
        out = cv2.GaussianBlur(out, (3, 3), 0.4 + 0.8 * u[6]).reshape(image_HWC.shape)
    gain = 0.75 + 0.5 * u[7]
    out = cv2.addWeighted(out, gain, out, 0, 127.5 * (1 - gain) + 40 * (u[8] - 0.5))
    return add_noise(out.reshape(image_HWC.shape).astype(np.uint8, copy=False), 8 * rng.random(), rng)


def add_noise(image: Image, deviation: float, rng: np.random.Generator) -> Image:
    """Adds uniform noise of a standard deviation in grey levels, the same in all channels, to (H, W) or (H, W, C)."""
    height, width = image.shape[:2]
    channels = image.shape[2] if image.ndim == 3 else 1
    # Bytes cost half of normal deviates, and cv2 then adds, rounds and saturates in one pass. The raw 64-bit numbers of
    # Philox and PCG64 equal the bytes of rng.bytes after deviates, at a fifth of its cost.
    raw = rng.bit_generator.random_raw(-(-height * width // 8)).astype("<u8", copy=False)
    noise = raw.view(np.uint8)[: height * width].reshape(height, width)
    share = deviation * 12**0.5 / 256
    noisy = cv2.addWeighted(image, 1, cv2.merge([noise] * channels), share, -127.5 * share)
    return noisy.reshape(image.shape).astype(np.uint8, copy=False)


def affine(
    from_size: tuple[int, int],
    to_size: tuple[int, int],
    degrees: float,
    slant: float,
    scale: tuple[float, float],
    move: tuple[float, float],
) -> NDArray[np.float64]:
    """Returns a matrix (2, 3) for cv2.WARP_INVERSE_MAP: the source position of each pixel of the result.

    The whole source fills the result, which is then scaled (x, y; 2 doubles the size), sheared and rotated about its
    centre, and shifted right and down by pixels of the result. Sizes are (height, width).
    """
    angle = math.radians(degrees)
    cos, sin = math.cos(angle), math.sin(angle)
    ratio_x, ratio_y = from_size[1] / to_size[1], from_size[0] / to_size[0]
    a, b = ratio_x / scale[0] * cos, ratio_x / scale[0] * (sin + slant)
    c, d = -ratio_y / scale[1] * sin, ratio_y / scale[1] * cos
    # Pixel i covers [i, i + 1): its centre is at i + 0.5, the centre of n pixels at (n - 1) / 2.
    x, y = (to_size[1] - 1) / 2 + move[0], (to_size[0] - 1) / 2 + move[1]
    return np.array([[a, b, (from_size[1] - 1) / 2 - a * x - b * y], [c, d, (from_size[0] - 1) / 2 - c * x - d * y]])
