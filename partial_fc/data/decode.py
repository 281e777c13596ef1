"""Decoder of image files to RGB pixels, and resizing, with OpenCV."""

import os
import zlib
from typing import Any

# A small file can declare any number of pixels. OpenCV reads this limit on import.
MAX_PIXELS = int(os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(2**26)))
# Otherwise it logs a line for every unknown TIFF tag.
os.environ.setdefault("OPENCV_LOG_LEVEL", "ERROR")

import cv2  # noqa: E402
import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402
from simplejpeg import decode_jpeg, decode_jpeg_header  # noqa: E402

from partial_fc.data.sample import BadRecord  # noqa: E402
from partial_fc.file_kind import it_is  # noqa: E402

MAX_JPEG = 2**24  # pixels; larger JPEGs are decoded at reduced size
MAX_ASPECT = 64  # of an image that is made square
# Only the common formats of OpenCV: every further decoder is another one that reads untrusted files.
_PNG = b"\x89PNG\r\n\x1a\n"
_UNUSED = (b"zTXt", b"iTXt", b"tEXt", b"iCCP")
# JFIF's marker without a thumbnail, and a frame header (three channels or one).
_PLAIN_JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF"
_SCAN = b"\xff\xda\x00"
_SIGNATURES = {b"\xff\xd8": "JPEG", _PNG: "PNG", b"BM": "BMP", b"RIFF": "WebP", b"GIF8": "GIF"}
_SIGNATURES |= dict.fromkeys((b"II*\0", b"MM\0*"), "TIFF")
_RARE = (b"GIF8", b"II*\0", b"MM\0*")

# OpenCV's flags by reduction of a JPEG's width and height.
_FLAGS = {1: cv2.IMREAD_COLOR_RGB}
_FLAGS |= {part: cv2.IMREAD_COLOR_RGB | flag for part, flag in ((2, 16), (4, 32), (8, 64))}

# The loader runs one image per thread; OpenCV's own pool would compete for the same cores.
cv2.setNumThreads(0)


def decode(content: bytes, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Decodes JPEG, PNG, BMP, WebP, GIF or TIFF to uint8 (H, W, 3) RGB; expands grey, drops alpha, reduces 16 bits to
    8, takes the first of several pictures (GIF, WebP, TIFF), applies the Exif orientation.

    out: uint8 (H, W, 3). An image of exactly that size may be decoded into it, and is then returned as it; by
    simplejpeg if that gives the same bits. A JPEG of more than MAX_JPEG pixels is decoded at a half, quarter or eighth
    of its width and height: 24 megapixels give 6. Raises BadRecord for other formats, damage, or more than MAX_PIXELS
    pixels.
    """
    # First of all: reading the header only to look for a large one takes 2 % of decoding 112 x 112 pixels.
    if out is not None and decode_into(content, out):
        return out
    part = _jpeg_part(content)
    if not content.startswith(tuple(_SIGNATURES)):
        raise BadRecord(
            f"no image that OpenCV can read: {len(content)} bytes, starting {content[:8].hex(' ')}{it_is(content)}; "
            f"expected {', '.join(dict.fromkeys(_SIGNATURES.values()))}"
        )
    if content[:2] == b"\xff\xd8" and content.rfind(b"\xff\xd9") < 0:
        # libjpeg would silently fill the missing part with grey.
        raise BadRecord(f"JPEG of {len(content)} bytes has no end marker (ff d9): it is cut short")
    if content.startswith(_PNG):
        content = _checked_png(content)
    try:
        image: Any = cv2.imdecode(np.frombuffer(content, np.uint8), _FLAGS[part])
    except cv2.error as error:
        raise BadRecord(
            f"no image that OpenCV can read: {error.err or error}; at most {MAX_PIXELS} pixels are allowed "
            "(the environment's OPENCV_IO_MAX_IMAGE_PIXELS)"
        ) from None
    if image is None:
        raise BadRecord(f"no image that OpenCV can read: {len(content)} bytes, starting {content[:8].hex(' ')}")
    return image


def _jpeg_part(content: bytes) -> int:
    """Returns the reduction of a JPEG: 1, or 2, 4 or 8 for a large one."""
    if not content.startswith(b"\xff\xd8"):
        return 1
    try:
        height, width, *_ = decode_jpeg_header(content)
    except ValueError:
        return 1  # OpenCV reports the error
    for part in _FLAGS:
        if height * width <= MAX_JPEG * part**2:
            return part
    raise BadRecord(f"JPEG of {width} x {height} pixels; at most {MAX_JPEG * part**2} can be read, at an eighth")


def decode_into(content: bytes, out: NDArray[np.uint8]) -> bool:
    """Decodes a JPEG into `out`, uint8 (H, W, 3) RGB, and returns whether it did. Leaves to `decode` other formats and
    sizes, Exif that may rotate, a missing end, and any warning from libjpeg."""
    if out.size > 3 * MAX_JPEG or not content.startswith(_PLAIN_JPEG):
        return False
    if content.find(b"\xff\xe1", 0, content.find(_SCAN)) >= 0 or content.rfind(b"\xff\xd9") < 0:
        return False
    try:
        return decode_jpeg(content, "RGB", buffer=out).shape == out.shape
    except ValueError:
        return False


def _checked_png(content: bytes) -> bytes:
    """Returns the PNG without text chunks and colour profiles, which are unused and can expand to megabytes each.

    Raises BadRecord for a file that OpenCV must not see: its decoder (4.11) ends with a segmentation fault for some
    damaged headers, and reads animations too.
    """
    at, first, left_out = len(_PNG), True, []
    while at < len(content):
        length, kind = int.from_bytes(content[at : at + 4], "big"), content[at + 4 : at + 8]
        end = at + 12 + length
        whole = end <= len(content) and zlib.crc32(content[at + 4 : end - 4]) == int.from_bytes(
            content[end - 4 : end], "big"
        )
        if not whole or first != (kind == b"IHDR") or kind in (b"acTL", b"fcTL", b"fdAT"):
            raise BadRecord(f"PNG of {len(content)} bytes: chunk {kind!r} at byte {at} is damaged, or of an animation")
        if first:
            width, height = (int.from_bytes(content[at + 8 + 4 * i : at + 12 + 4 * i], "big") for i in (0, 1))
            if not 0 < width * height <= MAX_PIXELS:
                raise BadRecord(f"PNG of {width} x {height} pixels; expected 1 to {MAX_PIXELS} in all")
        if kind in _UNUSED:
            left_out.append((at, end))
        if kind == b"IEND":
            edges = [0, *(edge for part in left_out for edge in part), len(content)]
            return b"".join(content[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)) if left_out else content
        at, first = end, False
    raise BadRecord(f"PNG of {len(content)} bytes has no end (IEND): it is cut short")


def check_proportions(image: NDArray[np.uint8]) -> None:
    """Raises BadRecord if one side is more than MAX_ASPECT times the other: such an image cannot be made square."""
    height, width = image.shape[:2]
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise BadRecord(f"image of {width} x {height} pixels; one side is more than {MAX_ASPECT} times the other")


def fit(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Resizes the shorter side to `size` and crops the middle: (H, W, 3) -> (size, size, 3).

    Returns an image of this size unchanged. Raises BadRecord as check_proportions.
    """
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    check_proportions(image)
    scale = size / min(height, width)
    height, width = max(size, round(height * scale)), max(size, round(width * scale))
    # Area averaging avoids aliasing but makes blocks when enlarging.
    resized: Any = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
    top, left = (height - size) // 2, (width - size) // 2
    return resized[top : top + size, left : left + size]


def encode_square(content: bytes | NDArray[np.uint8], size: int | None, quality: int, pad: bool = False) -> bytes:
    """Returns an image, a file or pixels, as a JPEG of size x size; a file unchanged if size is None, or if it has that
    size already and is no GIF or TIFF, which few record readers support. pad: make others square by black bars.

    Decodes the image in either case: an unusable one is detected here, not in training.
    """
    image = decode(content) if isinstance(content, bytes) else content.repeat(4 - content.shape[2], 2)[..., :3]
    check_proportions(image)
    if pad and (spare := image.shape[0] - image.shape[1]):
        bars = (max(0, -spare) // 2, (max(0, -spare) + 1) // 2, max(0, spare) // 2, (max(0, spare) + 1) // 2)
        image = content = np.asarray(cv2.copyMakeBorder(image, *bars, cv2.BORDER_CONSTANT), np.uint8)
    if isinstance(content, bytes) and (
        size is None or (image.shape[:2] == (size, size) and not content.startswith(_RARE))
    ):
        return content
    bgr = cv2.cvtColor(image if size is None else fit(image, size), cv2.COLOR_RGB2BGR)
    return cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
