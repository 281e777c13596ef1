"""Decoding into a place gives OpenCV's pixels, whatever the file."""

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from partial_fc.data.decode import decode, decode_into, encode_square
from partial_fc.data.sample import BadRecord


def image_of(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), np.uint8)
    return np.asarray(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), np.uint8)


def jpeg_of(image: NDArray[np.uint8], *settings: int) -> bytes:
    return cv2.imencode(".jpg", image, settings)[1].tobytes()


def opencv(content: bytes) -> NDArray[np.uint8]:
    return np.asarray(cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB))


SAMPLINGS = {name: getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}") for name in ("411", "420", "422", "440", "444")}


@pytest.mark.parametrize("size", [(112, 112), (40, 40), (17, 31), (1, 1), (8, 3)])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("progressive", [0, 1])
def test_same_bits_as_opencv(size: tuple[int, int], sampling: str, progressive: int) -> None:
    for quality in (30, 75, 95, 100):
        content = jpeg_of(
            image_of(*size), cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_PROGRESSIVE, progressive,
            cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[sampling], cv2.IMWRITE_JPEG_OPTIMIZE, quality % 2,
        )  # fmt: skip
        out = np.zeros((*size, 3), np.uint8)
        assert decode_into(content, out)
        np.testing.assert_array_equal(out, opencv(content))
        assert decode(content, out) is out


def test_gray_files() -> None:
    content = jpeg_of(image_of(20, 20)[:, :, :1])
    out = np.zeros((20, 20, 3), np.uint8)
    assert decode(content, out) is out
    np.testing.assert_array_equal(out, opencv(content))


@pytest.mark.parametrize("size", [(19, 20), (20, 19), (10, 40), (21, 20), (5, 5)])
def test_another_size_is_left_to_opencv(size: tuple[int, int]) -> None:
    content = jpeg_of(image_of(*size))
    np.testing.assert_array_equal(decode(content, np.zeros((20, 20, 3), np.uint8)), opencv(content))


def turned(content: bytes, behind: int) -> bytes:
    """The file with an Exif segment that says: upside down. behind: where it stands."""
    tiff = b"II*\0\x08\0\0\0" + b"\x01\0" + b"\x12\x01\x03\0\x01\0\0\0\x03\0\0\0" + bytes(4)
    segment = b"Exif\0\0" + tiff
    return content[:behind] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + content[behind:]


def test_what_exif_says_counts() -> None:
    """Also where the segment stands behind another one."""
    content = jpeg_of(image_of(20, 20))
    tables = content.index(b"\xff\xdb")
    behind_tables = content.index(b"\xff\xc0")
    for place in (2, tables, behind_tables):
        image = decode(turned(content, place), np.zeros((20, 20, 3), np.uint8))
        np.testing.assert_array_equal(image, opencv(turned(content, place)))
        np.testing.assert_array_equal(image, decode(content)[::-1, ::-1])


def test_damaged_files_are_opencvs_to_judge() -> None:
    content = jpeg_of(image_of(20, 20))
    out = np.zeros((20, 20, 3), np.uint8)
    with pytest.raises(BadRecord, match="no end marker"):
        decode(content[:-2], out)
    missing = content[:300] + content[360:]  # a warning of libjpeg, a picture all the same
    np.testing.assert_array_equal(decode(missing, out), opencv(missing))


def test_gif_and_tiff() -> None:
    """Of an animation the first picture; what is cut short is no picture."""
    image = image_of(20, 20)
    (whole, tiff), animation = cv2.imencode(".tiff", image), cv2.Animation()
    assert whole
    np.testing.assert_array_equal(decode(tiff.tobytes()), image[..., ::-1])
    animation.frames = [np.full((20, 20, 3), value, np.uint8) for value in (40, 200)]
    animation.durations = [100, 100]
    _, gif = cv2.imencodeanimation(".gif", animation)
    assert decode(gif.tobytes()).mean() < 80  # its few colours are mixed, the second picture is light
    for content in (tiff.tobytes(), gif.tobytes()):
        assert encode_square(content, 20, 95).startswith(b"\xff\xd8"), "which all readers of records know"
        with pytest.raises(BadRecord, match="OpenCV can read"):
            decode(content[: len(content) // 3])
