"""A picture of rows of captioned images, for a person to look at."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from partial_fc import findings

SIDE, A_ROW = 112, 10  # pixels of a tile, tiles
GAP, TITLE, CAPTION_LINE, CAPTION_LINES = 4, 22, 13, 2  # pixels, lines
_BACKGROUND, _BEHIND, _WHITE, _GREY, _RED = (24, 24, 24), (60, 60, 60), (255, 255, 255), (190, 190, 190), (230, 60, 60)

Pixels = NDArray[np.uint8]


class Tile(NamedTuple):
    """image: uint8 (H, W, 3) RGB, drawn as it is; none: a cross, it cannot be used. caption: lines below it, of which
    the end is shown where one is too long."""

    image: Pixels | None
    caption: Sequence[str]


class Row(NamedTuple):
    title: str
    tiles: Sequence[Tile]


def whole(image: Pixels, side: int = SIDE) -> Pixels:
    """All of an image, (H, W, 3) or (H, W, 1), in a square, with bars beside or above it."""
    height, width = image.shape[:2]
    scale = side / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    # Averaging over areas avoids aliasing; for enlarging it would give blocks.
    shrunk = cv2.resize(image, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR)
    square = np.full((side, side, 3), _BEHIND, np.uint8)
    top, left = (side - size[1]) // 2, (side - size[0]) // 2
    square[top : top + size[1], left : left + size[0]] = shrunk.reshape(size[1], size[0], -1)
    return square


def place_lines(place: Mapping[str, Any]) -> list[str]:
    """What names an image in a finding, as a caption: the file's name or the key first."""
    words = [
        str(value).rpartition("/")[2] if name == "file" else f"{name} {value}"
        for name, value in place.items()
        if name not in ("problem", "height", "width")
    ]
    size = [f"{place['width']} x {place['height']}"] if "height" in place else []
    return [*words[:1], ", ".join([*words[1:], *size])]


def check_sheet(flag: str, path: Path) -> None:
    """Raises ValueError, naming the flag, where no picture can be written: before all is looked at, not after."""
    findings.check_writable(path)
    if not cv2.haveImageWriter(str(path)):
        raise ValueError(f"{flag} {path}: expected the name of a picture, like sheet.png")


def write_sheet(path: Path, rows: Sequence[Row]) -> None:
    """Raises ValueError where the file cannot be written."""
    heights = [_height(row) for row in rows]
    width = max(A_ROW, *(len(row.tiles) for row in rows)) * (SIDE + GAP) + GAP
    picture = Image.new("RGB", (width, sum(heights)), _BACKGROUND)
    draw = ImageDraw.Draw(picture)
    top = 0
    for row, height in zip(rows, heights, strict=True):
        draw.text((GAP, top + TITLE - 5), _fitting(row.title, 13, width - 2 * GAP, keep_end=False), _WHITE, _font(13),
                  anchor="ls")  # fmt: skip
        for column, tile in enumerate(row.tiles):
            _draw_tile(picture, draw, tile, GAP + column * (SIDE + GAP), top + TITLE)
        top += height
    if not cv2.imwrite(str(path), np.asarray(picture)[..., ::-1]):
        raise ValueError(f"{path}: cannot be written; expected a file name like sheet.png in a folder that is there")


def _height(row: Row) -> int:
    tallest = max([SIDE, *(tile.image.shape[0] for tile in row.tiles if tile.image is not None)])
    return TITLE + tallest + CAPTION_LINE * CAPTION_LINES + GAP


def _draw_tile(picture: Image.Image, draw: ImageDraw.ImageDraw, tile: Tile, left: int, top: int) -> None:
    below = top + SIDE
    if tile.image is None:
        box = (left, top, left + SIDE - 1, top + SIDE - 1)
        draw.rectangle(box, (0, 0, 0))
        draw.line(box, _RED)
        draw.line((left, box[3], box[2], top), _RED)
    else:
        picture.paste(Image.fromarray(tile.image), (left, top))
        below = top + len(tile.image)
    for number, line in enumerate(tile.caption[:CAPTION_LINES], start=1):
        text = _fitting(line, 10, SIDE, keep_end=True)
        draw.text((left, below + number * CAPTION_LINE - 3), text, _GREY, _font(10), anchor="ls")


def _fitting(text: str, size: int, width: int, *, keep_end: bool) -> str:
    """What of a text fits: its end, which says more of a file's name than its beginning, or its beginning."""
    # Names that are no UTF-8 hold what no font has; those of tables hold tabs.
    text = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    text = "".join(char if _has(char) else f"U+{ord(char):04X} " for char in text)
    shown = text
    while shown and _font(size).getlength(shown if shown == text else shown + "…") > width:
        shown = shown[1:] if keep_end else shown[:-1]
    return text if shown == text else f"…{shown}" if keep_end else f"{shown}…"


@cache
def _has(char: str) -> bool:
    """Whether the font has it, or would draw the box that it draws of all that it lacks."""
    return char.isspace() or bytes(_font(10).getmask(char)) != bytes(_font(10).getmask("\uffff"))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """matplotlib brings it: Latin, Greek, Cyrillic."""
    # Not above: it takes 0.2 s, and most checks draw nothing.
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)
