"""Image files to RGB pixels of one size, with OpenCV."""

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from partial_fc.data.sample import BadRecord

# The loader has its own threads, one image each; OpenCV's own pool on top of them would fight for the same
# cores.
cv2.setNumThreads(0)


def decode(content: bytes) -> NDArray[np.uint8]:
    """JPEG, PNG, BMP, WebP ... -> uint8 (H, W, 3) RGB; grey is expanded, alpha dropped, 16 bits become 8."""
    if content[:2] == b"\xff\xd8" and content.rfind(b"\xff\xd9") < 0:
        # libjpeg would fill the missing part with grey and say nothing.
        raise BadRecord(f"JPEG of {len(content)} bytes has no end marker (ff d9): it is cut short")
    image: Any = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB) if content else None
    if image is None:
        raise BadRecord(
            f"no image that OpenCV can read: {len(content)} bytes, starting {content[:8].hex(' ')}"
        )
    return image


def fit(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Resizes the shorter side to `size` and crops the middle: (H, W, 3) -> (size, size, 3).

    An image that has this size is returned as it is. Non-square images keep their proportions.
    """
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    scale = size / min(height, width)
    height, width = max(size, round(height * scale)), max(size, round(width * scale))
    # Averaging over areas avoids aliasing; for enlarging it would give blocks.
    resized: Any = cv2.resize(
        image, (width, height), interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    )
    top, left = (height - size) // 2, (width - size) // 2
    return resized[top : top + size, left : left + size]


def encode_square(content: bytes, size: int | None, quality: int) -> bytes:
    """An image file of size x size as JPEG; the very same bytes if it has that size already or size is None.

    The image is decoded in either case, so that a damaged one is found here and not in training.
    """
    image = decode(content)
    if size is None or image.shape[:2] == (size, size):
        return content
    bgr = cv2.cvtColor(fit(image, size), cv2.COLOR_RGB2BGR)
    return cv2.imencode(".jpg", bgr, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()
