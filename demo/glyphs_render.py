"""Renderer of characters: a clean drawing at twice the size, small random distortions, then a grey JPEG.

Every image is a function of (seed, character, typeface, use, number), so any number of processes, in any order, draw
the same set.
"""

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from partial_fc import terminal
from partial_fc.data.augment import add_noise, affine

SHAPE_SIDE = 20  # resolution for comparisons of drawings
_CHUNK = 256
Item = TypeVar("Item")
Result = TypeVar("Result")


class Glyph(NamedTuple):
    """One image. typeface: index in TYPEFACES. use: 0 training, 1 the tests. number: counts images."""

    code: int
    typeface: int
    use: int = 0
    number: int = 0


@dataclass(frozen=True)
class Pen:
    """Draws characters. fonts: (file, index in it) of each typeface. size: in pixels."""

    fonts: tuple[tuple[Path, int], ...]
    size: int
    quality: int
    seed: int

    def jpeg(self, glyph: Glyph) -> bytes:
        """Returns a distorted image as a grey JPEG file."""
        image = distort(drawing(self, glyph.code, glyph.typeface), np.random.default_rng((self.seed, *glyph)))
        return cv2.imencode(".jpg", image, (cv2.IMWRITE_JPEG_QUALITY, self.quality))[1].tobytes()

    def digest(self, glyph: Glyph) -> bytes:
        """Returns the digest of the clean drawing; empty without ink."""
        ink = drawing(self, glyph.code, glyph.typeface)
        return hashlib.blake2b(ink.tobytes(), digest_size=16).digest() if ink.any() else b""

    def shape(self, glyph: Glyph) -> NDArray[np.float32]:
        """Returns the blurred drawing, mean 0, length 1, float32 (SHAPE_SIDE**2,): dot products are correlations."""
        blurred = cv2.GaussianBlur(drawing(self, glyph.code, glyph.typeface), (0, 0), 0.04 * self.size)
        small = cv2.resize(blurred, (SHAPE_SIDE, SHAPE_SIDE), interpolation=cv2.INTER_AREA)
        shape = small.astype(np.float32).ravel()
        shape -= shape.mean()
        return shape / max(float(np.linalg.norm(shape)), 1e-6)


@lru_cache(maxsize=1)  # images of a character in a typeface are consecutive
def drawing(pen: Pen, code: int, typeface: int) -> NDArray[np.uint8]:
    """Draws the undistorted character, ink 255 on 0, uint8 (2 * size, 2 * size); all 0 for an empty outline."""
    canvas = 2 * pen.size
    # 0.76: the corners of the largest characters stay inside after distortion.
    font = _font(*pen.fonts[typeface], round(0.76 * canvas))
    image = Image.new("L", (canvas, canvas))
    # Placed by baseline and advance width: centred by its ink, a high stroke would look like a low one.
    baseline = canvas / 2 + 0.38 * font.size
    ImageDraw.Draw(image).text((canvas / 2, baseline), chr(code), font=font, fill=255, anchor="ms")
    return np.asarray(image)


def distort(ink: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Distorts a clean drawing to a grey image of half its width, dark on light, uint8 (size, size): rotated, sheared,
    scaled, shifted, strokes blurred and heavier or lighter, varying brightness and contrast, noise."""
    size = len(ink) // 2
    u = rng.random(11)
    sigma = (0.8 + 0.7 * u[0]) * size / 40
    width = 2 * round(2 * sigma) + 1
    blurred = cv2.GaussianBlur(ink, (width, width), sigma)
    source = affine(
        (2 * size, 2 * size),
        (size, size),
        degrees=12 * u[1] - 6,
        slant=0.12 * u[2] - 0.06,
        scale=(0.86 + 0.2 * u[3], 0.86 + 0.2 * u[4]),
        move=(0.08 * size * (u[5] - 0.5), 0.08 * size * (u[6] - 0.5)),
    )
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    strokes = cv2.warpAffine(blurred, source, (size, size), flags=flags)
    strokes = cv2.convertScaleAbs(strokes, alpha=0.9 + 0.8 * u[7])
    paper = 190 + 65 * u[8]
    contrast = 90 + (paper - 90) * u[9]
    image = cv2.addWeighted(strokes, -contrast / 255, strokes, 0, paper).astype(np.uint8, copy=False)
    return add_noise(image, 10 * u[10], rng)


class Runner(Protocol):
    def __call__(self, work: Callable[[Item], Result], items: Sequence[Item], label: str) -> Iterable[Result]: ...


@contextmanager
def workers(jobs: int, chunk: int = _CHUNK) -> Iterator[Runner]:
    """Yields a parallel, ordered map of a function, such as a method of Pen, over many items; `jobs` processes (0: all
    cores), which take `chunk` items at a time."""
    jobs = jobs or len(os.sched_getaffinity(0))

    def run(work: Callable[[Item], Result], items: Sequence[Item], label: str) -> Iterable[Result]:
        results = pool.imap(work, items, chunk) if pool else map(work, items)
        return terminal.bar(results, total=len(items), desc=label, unit=" drawings")

    if jobs == 1:
        pool = None
        yield run
        return
    # Spawned, not forked: a fork would copy locks of torch's threads.
    with multiprocessing.get_context("spawn").Pool(jobs, cv2.setNumThreads, (1,)) as pool:
        yield run


@cache
def _font(path: Path, index: int, pixels: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), pixels, index, layout_engine=ImageFont.Layout.BASIC)
