"""Which frames of a video make a clip, by GluonCV's rules (gluoncv/data/video_custom/classification.py, v0.8.0).

A window of consecutive frames is chosen; of it the fast network sees every second frame, the slow one every sixteenth,
each the last of its group. n frames of the video, S segments.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Window:
    """A window of `length` frames, of which one in fast_stride and one in slow_stride are seen. Raises ValueError for
    strides that do not go into each other."""

    length: int = 64
    fast_stride: int = 2
    slow_stride: int = 16

    def __post_init__(self) -> None:
        if min(self.length, self.fast_stride, self.slow_stride) < 1 or self.slow_stride % self.fast_stride:
            raise ValueError(
                f"a window of {self.length} frames with strides {self.slow_stride} (slow) and {self.fast_stride} "
                "(fast): expected 1 or more, and a slow stride that is a multiple of the fast one "
                "(--new-length, --slow-temporal-stride, --fast-temporal-stride)"
            )
        if not self.num_slow:
            raise ValueError(
                f"a window of {self.length} frames has no slow frame: --slow-temporal-stride is {self.slow_stride}"
            )

    @property
    def num_fast(self) -> int:
        return self.length // self.fast_stride

    @property
    def num_slow(self) -> int:
        return self.length // self.slow_stride

    @property
    def num_frames(self) -> int:
        """Of a clip."""
        return self.num_fast + self.num_slow

    def offsets(self) -> list[int]:
        """In the window: the fast frames, then the slow ones."""
        return [
            offset
            for stride in (self.fast_stride, self.slow_stride)
            for offset in range(stride - 1, self.length // stride * stride, stride)
        ]

    def numbers(self, start: int, num_frames: int) -> list[int]:
        """The clip's frames, from 0, for a window that starts there. A video that ends within it repeats its last frame
        but one: GluonCV's reader stops there."""
        last = max(start, num_frames - 2)
        return [min(start + offset, last) for offset in self.offsets()]

    def random_start(self, num_frames: int, rng: np.random.Generator) -> int:
        """Any at which the window is whole; 0 for a shorter video."""
        return int(rng.integers(0, max(1, num_frames - self.length + 1)))

    def segment_start(self, num_frames: int, segment: int = 0, num_segments: int = 1) -> int:
        """The middle one of the starts that a segment of the video has; several segments of a video that has fewer
        starts share some. 0 where the window is as long as the video, or longer."""
        tick = max(0, num_frames - self.length + 1) / num_segments
        return int(tick / 2 + tick * segment)
