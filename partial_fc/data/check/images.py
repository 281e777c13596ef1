"""A scan of images: can they be decoded, are they damaged, is anything to be seen, does any occur twice?

N images scanned. All that is kept of one are 15 bytes.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from partial_fc.data.check.decoder_stderr import DecoderStderr
from partial_fc.data.decode import check_proportions, decode
from partial_fc.data.sample import BadRecord

# What is wrong with an image; the order is that of being worse. What is from CUT on cannot be used.
GOOD, PADDED, CONSTANT, GREY_REST, DAMAGED, CUT, NARROW, NOT_AN_IMAGE, NOT_READ = range(9)

_BLOCK = 64  # images that a thread scans before it takes the next ones
_WINDOW = 1024  # images among which one that the decoder complained about is looked for
_MESSAGES_KEPT = 10_000
_FLAT = 2  # grey levels by which a decoded JPEG of one colour may still vary
_GREY = (125, 131)  # libjpeg's filling decodes to 128, give or take
# Colour profiles and the like, which are not used. Pixels that are not whole are an error of libpng, not a warning.
_NOT_OF_PIXELS = "libpng warning:"
# All pixels have their value by then: a few bytes are a writer's padding, many are left over by damage before them.
_PADDING = re.compile(r"Corrupt JPEG data: ([12]?\d|3[0-2]) extraneous bytes before marker 0xd9")


@dataclass
class ImageScan:
    """code_N: one of the above. hash_N: of the file, 0: not decoded. height_N, width_N: pixels, 0: not decoded.
    messages: what is wrong with the first bad ones, by their index in these arrays."""

    code_N: NDArray[np.uint8]
    hash_N: NDArray[np.uint64]
    height_N: NDArray[np.uint16]
    width_N: NDArray[np.uint16]
    coloured_N: NDArray[np.bool_]
    messages: dict[int, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_images: int) -> "ImageScan":
        return cls(
            np.zeros(num_images, np.uint8),
            np.zeros(num_images, np.uint64),
            np.zeros(num_images, np.uint16),
            np.zeros(num_images, np.uint16),
            np.zeros(num_images, np.bool_),
        )

    def set_code(self, index: int, code: int, message: str = "") -> None:
        self.code_N[index] = code
        if message and len(self.messages) < _MESSAGES_KEPT:
            self.messages[index] = message

    def repetitions(self) -> NDArray[np.int64]:
        """Indices of equal files, (pairs, 2): each repetition behind the first of its kind; by the second."""
        order = np.argsort(self.hash_N, kind="stable")
        order = order[self.hash_N[order] != 0]
        ordered = self.hash_N[order]
        is_first = np.ones(len(order), np.bool_)
        is_first[1:] = ordered[1:] != ordered[:-1]
        first = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
        pairs = np.stack((first[~is_first], order[~is_first]), axis=1)
        return pairs[np.argsort(pairs[:, 1], kind="stable")]

    def sizes(self) -> list[tuple[int, int, int]]:
        """(height, width, number of images), the most frequent first."""
        decoded = self.height_N > 0
        packed = self.height_N[decoded].astype(np.int64) << 16 | self.width_N[decoded]
        values, counts = np.unique(packed, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return [(int(v) >> 16, int(v) & 0xFFFF, int(n)) for v, n in zip(values[order], counts[order], strict=True)]


def scan_images(
    read: Callable[[int], bytes | NDArray[np.uint8]],
    num_images: int,
    num_threads: int,
    *,
    hear_decoder: bool = False,
    bar: str = "",
) -> ImageScan:
    """Scans images 0 to num_images - 1, about in this order; read(i) gives the file of one, or its pixels (H, W, 3) or
    (H, W, 1), or raises BadRecord.

    hear_decoder: also find what the decoder only writes to stderr, which is then redirected. bar: the name of a
    progress bar; none without it.
    """
    scan = ImageScan.empty(num_images)

    def scan_one(index: int) -> None:
        _scan_image(scan, index, lambda: read(index))

    def scan_block(start: int) -> None:
        for index in range(start, min(start + _BLOCK, num_images)):
            scan_one(index)

    stderr = DecoderStderr() if hear_decoder else None
    with (
        stderr or nullcontext(),
        ThreadPoolExecutor(num_threads, thread_name_prefix="scan") as pool,
        tqdm(
            total=num_images, unit="image", desc=bar, disable=not bar, file=stderr.terminal if stderr else None
        ) as progress,
    ):
        for start in range(0, num_images, _WINDOW):
            stop = min(start + _WINDOW, num_images)
            list(pool.map(scan_block, range(start, stop, _BLOCK)))
            if stderr and _lines_about_pixels(stderr):
                _scan_again(scan, range(start, stop), scan_one, stderr)
            progress.update(stop - start)
    return scan


def _scan_again(
    scan: ImageScan, indices: Sequence[int], scan_one: Callable[[int], None], stderr: DecoderStderr
) -> None:
    """One after the other: with several threads nobody can tell which image a line of the decoder is about."""
    for index in indices:
        if scan.code_N[index] >= CUT:
            continue
        scan_one(index)
        lines = _lines_about_pixels(stderr)
        code = PADDED if all(map(_PADDING.fullmatch, lines)) else DAMAGED
        if lines and code > scan.code_N[index]:
            scan.set_code(index, code, lines[0])


def _lines_about_pixels(stderr: DecoderStderr) -> list[str]:
    lines = [line.strip() for line in stderr.new_lines()]
    return [line for line in lines if line and not line.startswith(_NOT_OF_PIXELS)]


def _scan_image(scan: ImageScan, index: int, read: Callable[[], bytes | NDArray[np.uint8]]) -> None:
    try:
        content = read()
    except BadRecord as error:
        scan.set_code(index, NOT_READ, str(error))
        return
    try:
        image = decode(content) if isinstance(content, bytes) else content
    except BadRecord as error:
        assert isinstance(content, bytes)
        is_cut = content[:2] == b"\xff\xd8" and content.rfind(b"\xff\xd9") < 0
        scan.set_code(index, CUT if is_cut else NOT_AN_IMAGE, str(error))
        return
    try:
        check_proportions(image)
    except BadRecord as error:
        scan.set_code(index, NARROW, str(error))
        return
    scan.height_N[index], scan.width_N[index] = (min(side, 65535) for side in image.shape[:2])
    scan.hash_N[index] = hash_of(content if isinstance(content, bytes) else content.tobytes())
    few = image[::4, ::4].astype(np.int16)
    scan.coloured_N[index] = (np.abs(few[..., :1] - few[..., 1:2]) > _FLAT).any()  # never, of a single channel
    scan.set_code(index, *_check_pixels(image))


def hash_of(content: bytes | memoryview) -> int:
    """A hash of 64 bits, never 0."""
    return max(1, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))


def _check_pixels(image_HWC: NDArray[np.uint8]) -> tuple[int, str]:
    """(code, message)"""
    low, high = int(image_HWC.min()), int(image_HWC.max())
    if high - low <= _FLAT:
        return CONSTANT, f"every pixel is {low}" if high == low else f"every pixel is {low} to {high}"
    height = len(image_HWC)
    row_HX = image_HWC.reshape(height, -1)
    if not _GREY[0] <= row_HX[-1].min() <= row_HX[-1].max() <= _GREY[1]:
        return GOOD, ""
    grey_H = (row_HX.min(axis=1) >= _GREY[0]) & (row_HX.max(axis=1) <= _GREY[1])
    rows = height if grey_H.all() else int(np.argmin(grey_H[::-1]))
    if rows < max(2, height // 8):
        return GOOD, ""
    return GREY_REST, f"the last {rows} of {height} rows are grey"
