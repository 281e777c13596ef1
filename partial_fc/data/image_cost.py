"""What an image file would cost to decode, from its header alone: a hundred bytes can announce gigabytes, or a hundred
passes over all pixels.

What the decoder takes of memory may be BASE_BYTES and four times the file's size. Figures of bytes a pixel: peaks of
OpenCV 5.0's decoders. The formats are those of ITU-T T.81, RFC 2083, TIFF 6.0, GIF89a, RFC 9649 and Microsoft's BMP.
"""

import os
import struct
from typing import NamedTuple

from partial_fc.data.sample import BadRecord

MAX_SCANS = 64  # of a JPEG; a progressive one has about ten, and each passes over all pixels, however few bytes it has
_DECODED, _GIF, _WEBP, _ANIMATED = 6, 12, 8, 16  # bytes a pixel, from first to last
_VARIABLE = "PARTIAL_FC_IMAGE_MIB"


def _base_bytes() -> int:
    text = os.environ.get(_VARIABLE, "64")
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 1 << 20:
        raise ValueError(f"{_VARIABLE} is {text!r}; expected a whole number of MiB from 1")
    return int(text) << 20


BASE_BYTES = _base_bytes()


class Cost(NamedTuple):
    """num_bytes: of memory that decoding takes."""

    kind: str
    width: int
    height: int
    num_bytes: int
    least_bytes: int = 0  # of these what remains however small the picture is made while it is decoded (JPEG)


def check_cost(content: bytes) -> int:
    """Returns 1, or 2, 4 or 8: a JPEG costs no more than its file is worth at that part of its width and height. A
    photo of 24 megapixels so gives one of 6. Raises BadRecord for an image that costs more all the same, and for one
    without a whole header. What begins as none of the formats passes."""
    reader = next((read for signature, read in _READERS.items() if content.startswith(signature)), None)
    if reader is None:
        return 1
    try:
        cost = reader(content)
    except (struct.error, IndexError):
        raise BadRecord(
            f"no image that OpenCV can read: {len(content)} bytes, starting {content[:8].hex(' ')}: no whole header"
        ) from None
    allowed = BASE_BYTES + 4 * len(content)
    parts = (1, 2, 4, 8) if cost.kind == "JPEG" else (1,)
    for part in parts:
        if cost.least_bytes + (cost.num_bytes - cost.least_bytes) / part**2 <= allowed:
            return part
    raise BadRecord(
        f"{cost.kind} of {cost.width} x {cost.height} pixels takes {cost.num_bytes >> 20:,} MiB to decode; one of "
        f"{len(content):,} bytes may take {allowed >> 20:,} MiB: make it smaller, or allow more ({_VARIABLE}, "
        f"{BASE_BYTES >> 20} MiB now)"
    )


# ---- JPEG

# Markers: of a frame; of one that is sent in several passes; without a length.
_FRAMES = frozenset((0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF))
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_ALONE = frozenset((0x00, 0x01, *range(0xD0, 0xD9), 0xFF))
_SOS, _EOI = 0xDA, 0xD9


def _jpeg(content: bytes) -> Cost:
    at, frame = 2, 0
    while True:  # on the way of every image that is trained on
        if content[at] != 0xFF:  # decoders look for the next marker, too
            at = content.find(b"\xff", at)
        marker = content[at + 1] if at >= 0 else _EOI
        if marker == _SOS:
            break
        if marker in _ALONE:
            at += 1 if marker == 0xFF else 2
            continue
        if marker == _EOI:
            raise BadRecord(f"JPEG of {len(content)} bytes without a picture")
        if marker in _FRAMES:
            frame = at
        at += 2 + (content[at + 2] << 8 | content[at + 3])
    height, width, components = struct.unpack_from(">HHB", content, frame + 5)
    passes = content[frame + 1] in _PROGRESSIVE or content[at + 4] < components
    if not frame or not passes:
        return Cost("JPEG", width, height, _DECODED * width * height)
    num_scans = content.count(b"\xff\xda", at)
    if num_scans > MAX_SCANS:
        raise BadRecord(f"JPEG of {num_scans} scans; expected at most {MAX_SCANS}: save it anew")
    # All coefficients are kept, 16 bits each, where it takes more than one scan to have them.
    factors = [(content[i] >> 4, content[i] & 15) for i in range(frame + 11, frame + 11 + 3 * components, 3)]
    most = max(1, max((h for h, _ in factors), default=1) * max((v for _, v in factors), default=1))
    coefficients = sum(h * v for h, v in factors) / most
    least = int(width * height * 2 * coefficients)
    return Cost("JPEG", width, height, _DECODED * width * height + least, least)


# ---- the others


def _png(content: bytes) -> Cost:
    width, height = struct.unpack_from(">II", content, 16)
    return Cost("PNG", width, height, _DECODED * width * height)


def _bmp(content: bytes) -> Cost:
    (header,) = struct.unpack_from("<I", content, 14)
    width, height = struct.unpack_from("<HH" if header == 12 else "<ii", content, 18)
    return Cost("BMP", abs(width), abs(height), _DECODED * abs(width * height))


def _gif(content: bytes) -> Cost:
    width, height = struct.unpack_from("<HH", content, 6)
    return Cost("GIF", width, height, _GIF * width * height)


def _webp(content: bytes) -> Cost:
    kind, each = content[12:16], _WEBP
    if kind == b"VP8X":
        each = _ANIMATED if content[20] & 2 else _WEBP
        width, height = (1 + int.from_bytes(content[begin : begin + 3], "little") for begin in (24, 27))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width, height = (size & 0x3FFF for size in struct.unpack_from("<HH", content, 26))
    return Cost("WebP", width, height, each * width * height)


_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _SAMPLES, _STRIPS, _TILE_WIDTH, _TILE_HEIGHT, _TILES = (
    *(256, 257, 258, 259, 277, 273),
    *(322, 323, 324),
)
_JPEGS = (6, 7)


def _tiff(content: bytes) -> Cost:
    order = "<" if content[:2] == b"II" else ">"
    (first,) = struct.unpack_from(f"{order}I", content, 4)
    (num_tags,) = struct.unpack_from(f"{order}H", content, first)
    value, count = {_BITS: 8, _SAMPLES: 1}, {}
    for number in range(num_tags):
        at = first + 2 + 12 * number
        tag, kind, num_values = struct.unpack_from(f"{order}HHI", content, at)
        size, letter = (2, "H") if kind == 3 else (4, "I")
        if num_values * size > 4:
            (at,) = struct.unpack_from(f"{order}I", content, at + 8)
            at -= 8
        if tag in (*value, _WIDTH, _HEIGHT, _COMPRESSION, _TILE_WIDTH, _TILE_HEIGHT):
            (value[tag],) = struct.unpack_from(f"{order}{letter}", content, at + 8)
        count[tag] = num_values
    width, height = value.get(_WIDTH, 0), value.get(_HEIGHT, 0)
    stored = max(1, value[_BITS]) * max(1, value[_SAMPLES]) / 8
    pixels = width * height
    if value.get(_COMPRESSION) in _JPEGS:
        parts = max(count.get(_STRIPS, 1), count.get(_TILES, 1))
        num_scans = content.count(b"\xff\xda")
        if num_scans > MAX_SCANS + 2 * parts:
            raise BadRecord(f"TIFF of {parts} JPEG parts with {num_scans} scans; expected one each: save it anew")
        stored *= 3
    # A strip can be all of the image, a tile far larger.
    at_once = max(pixels, value.get(_TILE_WIDTH, 0) * value.get(_TILE_HEIGHT, 0))
    return Cost("TIFF", width, height, int(_DECODED * pixels + stored * at_once))


_READERS = {
    b"\xff\xd8": _jpeg,
    b"\x89PNG": _png,
    b"BM": _bmp,
    b"GIF8": _gif,
    b"RIFF": _webp,
    b"II*\0": _tiff,
    b"MM\0*": _tiff,
}
