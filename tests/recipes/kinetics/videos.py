"""Videos whose frames say their number: in black and white blocks, which survive H.264."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np

BITS, SIDE = 9, 16  # blocks in two rows; pixels of one
HEIGHT, WIDTH = 2 * SIDE, (BITS + 1) // 2 * SIDE
MILLISECOND = Fraction(1, 1000)
LONG_GOP = {"g": "250", "bf": "3", "preset": "fast"}


def picture(number: int) -> np.ndarray:
    bits = [number >> i & 1 for i in range(BITS)] + [0]
    blocks = np.array(bits, np.uint8).reshape(2, -1) * 255
    return blocks.repeat(SIDE, 0).repeat(SIDE, 1)[:, :, None].repeat(3, 2)


def number(image: np.ndarray) -> int:
    """Of a frame, or of one that was resized."""
    blocks = cv2.resize(image, (WIDTH, HEIGHT)).mean(2)[SIDE // 2 :: SIDE, SIDE // 2 :: SIDE]
    return sum(1 << i for i, value in enumerate(blocks.ravel()[:BITS]) if value > 127)


def write(
    path: Path,
    num_frames: int,
    options: dict[str, str] | None = None,
    times: Sequence[int] | None = None,
    codec: str = "libx264",
) -> Path:
    """times: of presentation, in units of 1/1000 s; 40 apart where not given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        options = {"threads": "1", **({"preset": "ultrafast"} if codec == "libx264" else {}), **(options or {})}
        stream = container.add_stream(codec, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for i in range(num_frames):
            frame = av.VideoFrame.from_ndarray(picture(i), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[i], MILLISECOND
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path
