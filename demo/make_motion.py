"""`python -m demo motion`: short videos of characters in twelve kinds of motion, for recipe kinetics without
Kinetics.

Only time tells the classes apart: at any moment position (the picture is a torus), angle, size and brightness have the
same distribution in all classes. Training and test have different characters.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import av
import cv2
import numpy as np
from numpy.typing import NDArray

from partial_fc.findings import counted
from partial_fc.flags.facts import In, check_numbers
from recipes.kinetics.video.clip_list import write_list

from .glyphs_fonts import CHINESE, TYPEFACES, characters, choose, find_fonts
from .glyphs_render import Pen, drawing, workers

_RATE = 25
_CHUNK = 8  # clips that a process renders at a time
_SMALLEST, _LARGEST = 0.35, 0.75  # of a character, relative to the picture's side
_DIM = 0.3  # the minimum brightness
_NUM_CHARACTERS = 400  # of each of the two sets


@dataclass(frozen=True)
class MotionOptions:
    """Renders H.264 clips of moving characters: FOLDER/train/CLASS/*.mp4, FOLDER/val/..., train.txt, val.txt."""

    out: Path
    """Folder to make."""
    num_train: Annotated[int, In(12)] = 1800
    """Clips to train on, equally many of each of the twelve classes."""
    num_val: Annotated[int, In(12)] = 360
    """Clips to test on, of characters that are not trained on."""
    num_frames: Annotated[int, In(1)] = 80
    """Of a clip. 1: one moment of each, at random, which tells how much a single frame says of the class."""
    size: Annotated[int, In("[32, 16384]")] = 72
    """Pixels of a side."""
    seed: int = 0
    jobs: Annotated[int, In("[0, 4096]")] = 0
    """Processes; 0: one for each core."""
    fonts: Path = Path("/usr/share/fonts")
    """Folder below which the font files lie."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.size % 2:
            raise ValueError(f"--size is {self.size}; expected an even number (H.264)")


class _Path(NamedTuple):
    """A clip's frames: position (pixels), angle (degrees), size over the picture's, brightness; each (T,)."""

    x: NDArray
    y: NDArray
    angle: NDArray
    size: NDArray
    light: NDArray


_Move = Callable[[_Path, NDArray, np.random.Generator], _Path]


def _along(path: _Path, distance: NDArray, degrees: float) -> _Path:
    a = np.deg2rad(degrees)
    return path._replace(x=path.x + distance * np.cos(a), y=path.y + distance * np.sin(a))


def _straight(degrees: float) -> _Move:
    return lambda p, t, rng: _along(p, t * rng.uniform(1, 1.8), degrees + rng.uniform(-10, 10))


def _turn(sign: int) -> _Move:
    return lambda p, t, rng: p._replace(angle=p.angle + sign * t * rng.uniform(3, 6))


def _zoom(sign: int) -> _Move:
    def move(p: _Path, t: NDArray, rng: np.random.Generator) -> _Path:
        # The sizes of all other classes, in this order.
        through = np.linspace(np.log(_SMALLEST), np.log(_LARGEST), len(t)) if len(t) > 1 else np.log(p.size)
        return p._replace(size=np.exp(through[::sign]))

    return move


def _blink(p: _Path, t: NDArray, rng: np.random.Generator) -> _Path:
    phase = (t / rng.uniform(12, 24) + rng.random()) % 1
    return p._replace(light=_DIM + (1 - _DIM) * np.abs(2 * phase - 1))


def _shake(p: _Path, t: NDArray, rng: np.random.Generator) -> _Path:
    swing = rng.uniform(4, 7) * np.sin(2 * np.pi * (t / rng.uniform(8, 14) + rng.random()))
    return _along(p, swing, rng.uniform(0, 360))


def _change_speed(sign: int) -> _Move:
    def move(p: _Path, t: NDArray, rng: np.random.Generator) -> _Path:
        speed = np.linspace(0.1, rng.uniform(2.5, 3.2), len(t))[::sign]
        return _along(p, speed.cumsum(), rng.uniform(0, 360))

    return move


MOTIONS: dict[str, _Move] = {
    "left": _straight(180),
    "right": _straight(0),
    "up": _straight(270),
    "down": _straight(90),
    "turning_left": _turn(1),
    "turning_right": _turn(-1),
    "growing": _zoom(1),
    "shrinking": _zoom(-1),
    "blinking": _blink,
    "shaking": _shake,
    "speeding_up": _change_speed(1),
    "slowing_down": _change_speed(-1),
}


class _Clip(NamedTuple):
    """A clip. number: in the whole set. code: the character."""

    path: Path
    motion: str
    code: int
    number: int


def make_motion(options: MotionOptions) -> None:
    """Writes the clips and their lists. Raises ValueError for a non-empty folder."""
    if options.out.exists() and any(options.out.iterdir()):
        raise ValueError(f"{options.out} is there and not empty; name another folder, or remove it")
    fonts = find_fonts(options.fonts, [TYPEFACES[i] for i in CHINESE])
    codes = choose(characters(fonts), _NUM_CHARACTERS, _NUM_CHARACTERS, options.seed)
    pen = Pen(tuple((font.path, font.index) for font in fonts), options.size, 90, options.seed)
    names = sorted(MOTIONS)
    with workers(options.jobs, _CHUNK) as run:
        for split, count, of_split in zip(("train", "val"), (options.num_train, options.num_val), codes, strict=True):
            clips = []
            for number in range(count):
                motion = names[number % len(names)]
                path = options.out / split / motion / f"{motion}_{number:06d}.mp4"
                path.parent.mkdir(parents=True, exist_ok=True)
                key = number + (options.num_train if split == "val" else 0)
                clips.append(_Clip(path, motion, of_split[key % len(of_split)], key))
            for _ in run(partial(_render, pen, options.num_frames), clips, split):
                pass
            lines = [(str(clip.path.relative_to(options.out)), options.num_frames, names.index(clip.motion))
                     for clip in clips]  # fmt: skip
            write_list(options.out / f"{split}.txt", lines)
    (options.out / "classes.txt").write_text("".join(f"{name}\n" for name in names))
    kept = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    (options.out / "manifest.json").write_text(json.dumps(kept, indent=1) + "\n")
    total = counted(options.num_train + options.num_val, "clip")
    print(f"{options.out}: {total} of {counted(options.num_frames, 'frame')}; --num-classes {len(names)}")


def _render(pen: Pen, num_frames: int, clip: _Clip) -> None:
    rng = np.random.default_rng((pen.seed, clip.number))
    ink = drawing(pen, clip.code, CHINESE[int(rng.integers(len(CHINESE)))])
    path = _path(clip.motion, pen.size, num_frames, rng)
    paper, noise = rng.uniform(0, 60), rng.uniform(0, 6)
    with av.open(str(clip.path), "w") as container:
        stream = container.add_stream("libx264", rate=_RATE, options={"preset": "veryfast", "threads": "1"})
        stream.width = stream.height = pen.size
        stream.pix_fmt = "yuv420p"
        for moment in zip(*path, strict=True):
            grey = paper + (255 - paper) * _draw(ink, pen.size, *moment) + rng.normal(0, noise, (pen.size, pen.size))
            image = np.clip(grey, 0, 255).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(image[:, :, None].repeat(3, 2), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _path(motion: str, side: int, num_frames: int, rng: np.random.Generator) -> _Path:
    """Returns a clip's path: random values as in every class, moved as this one does; one frame: a random moment."""
    length = max(num_frames, 80)
    x, y, angle = rng.uniform(0, side), rng.uniform(0, side), rng.uniform(0, 360)
    size, light = np.exp(rng.uniform(np.log(_SMALLEST), np.log(_LARGEST))), rng.uniform(_DIM, 1)
    at_rest = _Path(*(np.full(length, value) for value in (x, y, angle, size, light)))
    path = MOTIONS[motion](at_rest, np.arange(length, dtype=float), rng)
    first = int(rng.integers(0, length - num_frames + 1))
    return _Path(*(values[first : first + num_frames] for values in path))


def _draw(ink: NDArray[np.uint8], side: int, x: float, y: float, angle: float, size: float, light: float) -> NDArray:
    """Draws the character on a torus, float (side, side), 0 to 1."""
    matrix = cv2.getRotationMatrix2D((len(ink) / 2, len(ink) / 2), angle, size * side / len(ink))
    matrix[0, 2] += side / 2 - len(ink) / 2 + x % 1
    matrix[1, 2] += side / 2 - len(ink) / 2 + y % 1
    drawn = cv2.warpAffine(ink, matrix, (side, side), flags=cv2.INTER_AREA)
    return np.roll(drawn, (int(y) % side, int(x) % side), (0, 1)) * (light / 255)
