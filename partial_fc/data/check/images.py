"""A look at images: can they be decoded, are they damaged, is anything to be seen, does any occur twice?

N images looked at. All that is kept of one are 15 bytes.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from partial_fc.data.check.decoder_stderr import Complaints
from partial_fc.data.decode import check_proportions, decode
from partial_fc.data.sample import BadRecord

# What a look ends with. The order is that of being worse: what is from CUT on cannot be used.
GOOD, PADDED, CONSTANT, GREY_REST, DAMAGED, CUT, NARROW, NOT_AN_IMAGE, NOT_READ = range(9)

_BLOCK = 64  # images that a thread looks at before it takes the next ones
_WINDOW = 1024  # images among which one that the decoder complained about is looked for
_MESSAGES_KEPT = 10_000
_FLAT = 2  # grey levels by which a decoded JPEG of one colour may still vary
_GREY = (125, 131)  # libjpeg's filling decodes to 128, give or take
# Colour profiles and the like, which are not used. Pixels that are not whole are an error of libpng, not a warning.
_NOT_OF_PIXELS = "libpng warning:"
# All pixels have their value by then: a few bytes are a writer's padding, many are left over by damage before them.
_PADDING = re.compile(r"Corrupt JPEG data: ([12]?\d|3[0-2]) extraneous bytes before marker 0xd9")


@dataclass
class Looks:
    """code_N: uint8, one of the above. hash_N: uint64, of the file, 0: not decoded. height_N, width_N: uint16
    pixels, 0: not decoded. coloured_N: bool. messages: what was wrong with the first bad ones, by place in
    these arrays."""

    code_N: NDArray[np.uint8]
    hash_N: NDArray[np.uint64]
    height_N: NDArray[np.uint16]
    width_N: NDArray[np.uint16]
    coloured_N: NDArray[np.bool_]
    messages: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, num_images: int) -> "Looks":
        return cls(
            np.zeros(num_images, np.uint8),
            np.zeros(num_images, np.uint64),
            np.zeros(num_images, np.uint16),
            np.zeros(num_images, np.uint16),
            np.zeros(num_images, np.bool_),
        )

    def note(self, place: int, code: int, message: str = "") -> None:
        self.code_N[place] = code
        if message and len(self.messages) < _MESSAGES_KEPT:
            self.messages[place] = message


def examine(
    read: Callable[[int], bytes],
    num_images: int,
    num_threads: int,
    *,
    hear_decoder: bool = False,
    bar: str = "",
) -> Looks:
    """Looks at images 0 to num_images - 1, about in this order; read(i) gives the file of one or raises BadRecord.

    hear_decoder: also find what the decoder only writes to stderr, which is then redirected. bar: the name of a
    progress bar; none without it.
    """
    looks = Looks.of(num_images)

    def look_at(place: int) -> None:
        _look(looks, place, lambda: read(place))

    def look_at_block(start: int) -> None:
        for place in range(start, min(start + _BLOCK, num_images)):
            look_at(place)

    complaints = Complaints() if hear_decoder else None
    with (
        complaints or nullcontext(),
        ThreadPoolExecutor(num_threads, thread_name_prefix="doctor") as pool,
        tqdm(
            total=num_images,
            unit="image",
            desc=bar,
            disable=not bar,
            file=complaints.terminal if complaints else None,
        ) as progress,
    ):
        for start in range(0, num_images, _WINDOW):
            stop = min(start + _WINDOW, num_images)
            list(pool.map(look_at_block, range(start, stop, _BLOCK)))
            if complaints and _about_pixels(complaints):
                _look_again(looks, range(start, stop), look_at, complaints)
            progress.update(stop - start)
    return looks


def _look_again(looks: Looks, places: Sequence[int], look_at: Callable[[int], None], complaints: Complaints) -> None:
    """One after the other: with several threads nobody can tell which image a complaint is about."""
    for place in places:
        if looks.code_N[place] >= CUT:
            continue
        look_at(place)
        said = _about_pixels(complaints)
        code = PADDED if all(map(_PADDING.fullmatch, said)) else DAMAGED
        if said and code > looks.code_N[place]:
            looks.note(place, code, said[0])


def _about_pixels(complaints: Complaints) -> list[str]:
    lines = [line.strip() for line in complaints.take()]
    return [line for line in lines if line and not line.startswith(_NOT_OF_PIXELS)]


def _look(looks: Looks, place: int, read: Callable[[], bytes]) -> None:
    try:
        content = read()
    except BadRecord as error:
        looks.note(place, NOT_READ, str(error))
        return
    try:
        image = decode(content)
    except BadRecord as error:
        cut = content[:2] == b"\xff\xd8" and content.rfind(b"\xff\xd9") < 0
        looks.note(place, CUT if cut else NOT_AN_IMAGE, str(error))
        return
    try:
        check_proportions(image)
    except BadRecord as error:
        looks.note(place, NARROW, str(error))
        return
    looks.height_N[place], looks.width_N[place] = (min(side, 65535) for side in image.shape[:2])
    looks.hash_N[place] = max(1, int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))
    few = image[::4, ::4].astype(np.int16)
    looks.coloured_N[place] = (np.abs(few[..., 0] - few[..., 1]) > _FLAT).any()
    code, message = _seen(image)
    looks.note(place, code, message)


def _seen(image_HWC: NDArray[np.uint8]) -> tuple[int, str]:
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


def repeated(hash_N: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Places of equal files, (pairs, 2): each repetition beside the first of its kind. int64, by the second."""
    order = np.argsort(hash_N, kind="stable")
    order = order[hash_N[order] != 0]
    ordered = hash_N[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    first = order[np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))]
    pairs = np.stack((first[~is_first], order[~is_first]), axis=1)
    return pairs[np.argsort(pairs[:, 1], kind="stable")]


def sizes(looks: Looks) -> list[tuple[int, int, int]]:
    """(height, width, number of images), the most frequent first."""
    decoded = looks.height_N > 0
    packed = looks.height_N[decoded].astype(np.int64) << 16 | looks.width_N[decoded]
    values, counts = np.unique(packed, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return [(int(v) >> 16, int(v) & 0xFFFF, int(n)) for v, n in zip(values[order], counts[order], strict=True)]


def described(looks: Looks, describe: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    """`describe`, with what was wrong with the image."""

    def with_message(place: int) -> dict[str, Any]:
        message = looks.messages.get(place)
        return {**describe(place), **({"problem": message} if message else {})}

    return with_message
