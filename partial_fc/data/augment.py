"""Augmentation of faces, photos and characters; characters share their distortions with the renderer of the glyph set.
cv2 and numpy only; the loader has the threads."""

import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
_GREY = np.array([0.299, 0.587, 0.114])  # a grey level's share of red, green and blue
_RESIZE = (cv2.INTER_NEAREST, cv2.INTER_LINEAR, cv2.INTER_AREA, cv2.INTER_CUBIC, cv2.INTER_LANCZOS4)


@dataclass(frozen=True)
class Distortions:
    """Distorts an RGB image, each way by a chance of its own, in this order; may modify the image in place.

    crop: all but a window of 20 to 100 % of the area becomes black. low_resolution: down to 20 to 100 % of the size
    and back. photometric: brightness, contrast and saturation times 0.5 to 1.5. blur: of 0.3 to 2 pixels. grey. jpeg:
    quality 20 to 90. erase: a window of 2 to 20 % of the area becomes one random colour. Windows have sides of 3:4 to
    4:3. (Crop, low resolution and photometric: Kim, Jain, Liu, 2022, "AdaFace", https://arxiv.org/abs/2204.00964.)
    """

    crop: float = 0.0
    low_resolution: float = 0.0
    photometric: float = 0.0
    blur: float = 0.0
    grey: float = 0.0
    jpeg: float = 0.0
    erase: float = 0.0

    def __call__(self, image: Image, rng: np.random.Generator) -> Image:
        crop, low_resolution, photo, blur, grey, jpeg, erase = rng.random(7)
        if crop < self.crop:
            kept = window(image, rng.uniform(0.2, 1), rng)
            image, whole = np.zeros_like(image), image
            image[kept] = whole[kept]
        if low_resolution < self.low_resolution:
            (height, width), share = image.shape[:2], rng.uniform(0.2, 1)
            down, up = (_RESIZE[way] for way in rng.integers(0, len(_RESIZE), 2))
            small = cv2.resize(image, (math.ceil(share * width), math.ceil(share * height)), interpolation=down)
            image = np.asarray(cv2.resize(small, (width, height), interpolation=up), np.uint8)
        if photo < self.photometric:
            image = photometric(image, *rng.uniform(0.5, 1.5, 3))
        if blur < self.blur:
            image = np.asarray(cv2.GaussianBlur(image, (0, 0), rng.uniform(0.3, 2)), np.uint8)
        if grey < self.grey:
            image = photometric(image, saturation=0.0)
        if jpeg < self.jpeg:
            quality = [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(20, 91))]
            file = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), quality)[1]
            decoded = cv2.imdecode(file, cv2.IMREAD_COLOR)
            assert decoded is not None
            image = np.asarray(cv2.cvtColor(decoded, cv2.COLOR_BGR2RGB), np.uint8)
        if erase < self.erase:
            image[window(image, rng.uniform(0.02, 0.2), rng)] = rng.integers(0, 256, 3)
        return image


FACE = Distortions(crop=0.2, low_resolution=0.2, photometric=0.2, blur=0.1, grey=0.05, jpeg=0.1, erase=0.1)
PHOTO = Distortions(photometric=0.8, blur=0.1, grey=0.1, erase=0.25)  # after `window`, see SquareImage


def window(image_HWC: Image, area: float, rng: np.random.Generator) -> tuple[slice, slice]:
    """Returns a random window: a share of the image's area, with sides of 3:4 to 4:3 of the image's."""
    (height, width), ratio = image_HWC.shape[:2], math.exp(rng.uniform(-0.5, 0.5) * math.log(4 / 3))
    tall, wide = (max(1, round(math.sqrt(area) * side)) for side in (height * ratio, width / ratio))
    tall, wide = min(tall, height), min(wide, width)
    top, left = int(rng.integers(0, height - tall + 1)), int(rng.integers(0, width - wide + 1))
    return slice(top, top + tall), slice(left, left + wide)


def photometric(image: Image, brightness: float = 1.0, contrast: float = 1.0, saturation: float = 1.0) -> Image:
    """Multiplies the brightness, the distance to the mean grey level, and each pixel's distance to its own grey level;
    rounds once."""
    mean = brightness * float(np.dot(cv2.mean(image)[:3], _GREY))
    matrix = brightness * contrast * (saturation * np.eye(3) + (1 - saturation) * _GREY)
    return np.asarray(cv2.transform(image, np.column_stack((matrix, np.full(3, (1 - contrast) * mean)))), np.uint8)


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
