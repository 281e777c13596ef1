"""Transforms of videos: (sample, rng, out) -> uint8 (T, H, W, 3), the fast frames, then the slow ones.

A clip is a window of consecutive frames; the fast network sees every second frame of it, the slow one every sixteenth,
each the last of its group. Augmentations v1 to v4 are GluonCV's (gluoncv/data/video_custom/classification.py,
transforms/video.py, v0.8.0): resize the frame, crop a rectangle, make it square, perhaps flip it; drawn once a clip.
"""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from partial_fc.data.decode import check_proportions
from partial_fc.data.sample import BadRecord, Frames, Sample

Pixels = NDArray[np.uint8]
Augmentation = Literal["v1", "v2", "v3", "v4"]
_NEAR = 2  # pixels; a crop side within this of the wanted one is set to it
_TRIES, _AREA, _ASPECT = 10, (0.08, 1.0), (3 / 4, 4 / 3)  # of v4's rectangle
# (width, height) of the resized frames, None: unchanged; and the crops of each frame: one clip per crop.
_Plan = tuple[tuple[int, int] | None, list["_Cut"]]
# Possible crop positions, in quarters of the free space: (down, right).
_PLACES = [(0, 0), (0, 4), (4, 0), (4, 4), (2, 2)]
_MORE_PLACES = [(0, 2), (4, 2), (2, 0), (2, 4), (1, 1), (1, 3), (3, 1), (3, 3)]


@dataclass(frozen=True)
class Window:
    """A window of `length` frames, of which every fast_stride-th and every slow_stride-th is used. Raises ValueError
    for strides of which one does not divide the other."""

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
        """Returns the frames of a clip."""
        return self.num_fast + self.num_slow

    def offsets(self) -> list[int]:
        """Returns the offsets in the window: fast frames, then slow ones."""
        return [
            offset
            for stride in (self.fast_stride, self.slow_stride)
            for offset in range(stride - 1, self.length // stride * stride, stride)
        ]

    def numbers(self, start: int, num_frames: int) -> list[int]:
        """Returns the clip's frame numbers, from 0, for a window start. A video that ends within the window repeats its
        last frame but one: GluonCV's reader stops there."""
        last = max(start, num_frames - 2)
        return [min(start + offset, last) for offset in self.offsets()]

    def random_start(self, num_frames: int, rng: np.random.Generator) -> int:
        """Returns a random start with the whole window inside; 0 for a shorter video."""
        return int(rng.integers(0, max(1, num_frames - self.length + 1)))

    def segment_start(self, num_frames: int, segment: int = 0, num_segments: int = 1) -> int:
        """Returns the middle of a segment's possible starts; segments of a video with fewer starts share some. 0 if the
        window is as long as the video, or longer."""
        tick = max(0, num_frames - self.length + 1) / num_segments
        return int(tick / 2 + tick * segment)


class _Cut(NamedTuple):
    """The crop of every (resized) frame of a clip: a rectangle, made square, perhaps flipped."""

    top: int
    left: int
    height: int
    width: int
    mirrored: bool = False


@dataclass(frozen=True, kw_only=True)
class ClipTransform:
    """Clips of input_size x input_size pixels.

    random: a random window, augmented, for training; else the middle window and a centre crop. kind: of augmentation;
    v1 resizes every frame to new_width x new_height, the others keep proportions. all_places: 13 crop positions instead
    of 5. Raises ValueError for inconsistent sizes.
    """

    window: Window
    input_size: int
    new_width: int
    new_height: int
    kind: Augmentation = "v1"
    random: bool = False
    scale_ratios: tuple[float, ...] = (1.0, 0.875, 0.75, 0.66)
    max_distort: int = 1
    mirror: bool = True
    all_places: bool = True

    def __post_init__(self) -> None:
        sides = {"v1": (self.new_height, self.new_width), "v4": (self.new_height,) if not self.random else ()}
        smallest = min(sides.get(self.kind, (self.new_height,)), default=self.input_size)
        if smallest < self.input_size:
            raise ValueError(
                f"frames are made {self.new_width} x {self.new_height} (--new-width, --new-height; --data-aug "
                f"{self.kind}), smaller than the crop, --input-size {self.input_size}; give larger ones"
            )
        if self.kind == "v3" and self.random and self.new_width < self.new_height:
            raise ValueError(
                f"--data-aug v3 draws the shorter side from --new-height {self.new_height} to --new-width "
                f"{self.new_width}; expected a range that rises"
            )
        if not self.scale_ratios or not all(0 < ratio <= 1 for ratio in self.scale_ratios):
            raise ValueError(f"--scale-ratios are {self.scale_ratios}; expected numbers above 0, up to 1")

    def __call__(self, sample: Sample, rng: np.random.Generator, out: Pixels | None = None) -> Pixels:
        def numbers(num_frames: int) -> list[int]:
            is_random = self.random
            start = self.window.random_start(num_frames, rng) if is_random else self.window.segment_start(num_frames)
            return self.window.numbers(start, num_frames)

        def plan(height: int, width: int) -> _Plan:
            return self._random_plan(height, width, rng) if self.random else self._test_plan(height, width)

        clips = self._clips(sample, numbers, plan, out)
        return clips[0] if out is None else out

    def views(self, sample: Sample, segment: int, num_segments: int, three_crop: bool) -> Pixels:
        """Returns a segment's test views, uint8 (V, T, H, W, 3): the middle, or three crops along the longer side."""

        def numbers(num_frames: int) -> list[int]:
            return self.window.numbers(self.window.segment_start(num_frames, segment, num_segments), num_frames)

        plan = self._three_crop_plan if three_crop else self._test_plan
        return self._clips(sample, numbers, plan, None)

    def _clips(
        self, sample: Sample, choose: Callable[[int], list[int]], plan: Callable[[int, int], _Plan], out: Pixels | None
    ) -> Pixels:
        """Returns (cuts of the plan, T, H, W, 3); a single cut may be `out`, (T, H, W, 3)."""
        assert isinstance(sample.image, Frames)
        chosen: list[int] = []

        def remember(num_frames: int) -> list[int]:
            chosen.extend(choose(num_frames))
            return chosen

        clips: Pixels | None = None
        first_shape: tuple[int, ...] = ()
        with closing(sample.image.read(remember)) as frames:
            for number, frame in frames:
                if clips is None:
                    check_proportions(frame)
                    size, cuts = plan(*frame.shape[:2])
                    shape = (len(cuts), len(chosen), self.input_size, self.input_size, 3)
                    clips, first_shape = np.empty(shape, np.uint8) if out is None else out[None], frame.shape
                if frame.shape != first_shape:
                    raise BadRecord(f"frame {number} is {frame.shape[:2]} pixels, those before {first_shape[:2]}")
                if size and size != frame.shape[1::-1]:
                    frame = np.asarray(cv2.resize(frame, size, interpolation=cv2.INTER_LINEAR), np.uint8)
                places = [i for i, n in enumerate(chosen) if n == number]
                for clip, cut in zip(clips, cuts, strict=True):
                    clip[places] = _square(frame, cut, self.input_size)
        assert clips is not None
        return clips

    def _random_plan(self, height: int, width: int, rng: np.random.Generator) -> _Plan:
        if self.kind == "v4":
            rectangle = _random_rectangle(height, width, rng)
            return None, [_Cut(*rectangle, mirrored=self.mirror and rng.random() < 0.5)]
        if self.kind == "v3":
            width, height = short_side(height, width, int(rng.integers(self.new_height, self.new_width + 1)))
            rows = columns = self.input_size
            top, left = (int(rng.integers(0, n - self.input_size + 1)) for n in (height, width))
        else:
            width, height = self._size(height, width)
            sides, places = self.sides(height, width), self.places()
            rows, columns = sides[rng.integers(len(sides))]
            down, right = places[rng.integers(len(places))]
            top, left = (height - rows) // 4 * down, (width - columns) // 4 * right
        return (width, height), [_Cut(top, left, rows, columns, self.mirror and rng.random() < 0.5)]

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the resized (width, height) of v1's and v2's frames, and of all tests."""
        return (self.new_width, self.new_height) if self.kind == "v1" else short_side(height, width, self.new_height)

    def sides(self, height: int, width: int) -> list[tuple[int, int]]:
        """Returns (height, width) of the crops to choose from."""
        sides = [int(min(height, width) * ratio) for ratio in self.scale_ratios]
        sides = [self.input_size if abs(side - self.input_size) <= _NEAR else side for side in sides]
        return [
            (rows, columns)
            for (i, rows), (j, columns) in product(enumerate(sides), repeat=2)
            if abs(i - j) <= self.max_distort
        ]

    def places(self) -> list[tuple[int, int]]:
        return _PLACES + _MORE_PLACES if self.all_places else _PLACES

    def _test_plan(self, height: int, width: int) -> _Plan:
        side = self.input_size
        width, height = self._size(height, width)
        return (width, height), [_Cut(round((height - side) / 2), round((width - side) / 2), side, side)]

    def _three_crop_plan(self, height: int, width: int) -> _Plan:
        """Plans three crops: one end, the other end, the middle."""
        side = self.input_size
        width, height = self._size(height, width)
        if side not in (height, width):
            raise ValueError(
                f"--three-crop: the frames are {width} x {height}, the crops {side} x {side}; they lie along the "
                "longer side, so give the shorter one as --input-size"
            )
        down, right = (height - side) // 2, (width - side) // 2
        return (width, height), [_Cut(down * i, right * i, side, side) for i in (0, 2, 1)]


def short_side(height: int, width: int, side: int) -> tuple[int, int]:
    """Returns (width, height) with the shorter side set to `side`, the other in proportion."""
    return (side, int(height * side / width)) if width < height else (int(width * side / height), side)


def _random_rectangle(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Returns a random (top, left, height, width); the largest centred square if ten tries do not fit."""
    for _ in range(_TRIES):
        area = height * width * rng.uniform(*_AREA)
        aspect = math.exp(rng.uniform(math.log(_ASPECT[0]), math.log(_ASPECT[1])))
        columns, rows = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < rows <= height and 0 < columns <= width:
            return (int(rng.integers(0, height - rows + 1)), int(rng.integers(0, width - columns + 1)), rows, columns)
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def _square(frame: Pixels, cut: _Cut, side: int) -> Pixels:
    part = frame[cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
    if part.shape[:2] != (side, side):
        part = np.asarray(cv2.resize(part, (side, side), interpolation=cv2.INTER_LINEAR), np.uint8)
    return part[:, ::-1] if cut.mirrored else part
