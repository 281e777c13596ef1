"""Sheets of captioned images, for a person to look at.

An image is uint8 (H, W, 3) RGB or (H, W, 1) grey; a sheet is RGB.
"""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from partial_fc import findings
from partial_fc.accessories import import_matplotlib
from partial_fc.files import replacing

SIDE, A_ROW = 112, 10  # pixels of a tile, tiles
GAP, TITLE, CAPTION, CAPTION_LINE = 4, 22, 12, 15  # pixels
_BAR = 4  # pixels
RED, GREEN = (230, 60, 60), (60, 180, 90)
_BACKGROUND, _BEHIND, _WHITE, _GREY = (24, 24, 24), (60, 60, 60), (255, 255, 255), (190, 190, 190)

Pixels = NDArray[np.uint8]
Colour = tuple[int, int, int]


class Tile(NamedTuple):
    """An image of a sheet. image: unscaled; None (unusable): a cross. caption: lines below it; long ones show their
    end. bar: the colour of a bar at the top."""

    image: Pixels | None
    caption: Sequence[str] = ()
    bar: Colour | None = None


class Row(NamedTuple):
    """A row of tiles. title: the line above; "": none."""

    title: str
    tiles: Sequence[Tile]


def fit(image: Pixels, side: int = SIDE) -> Pixels:
    """Fits an image into the middle of a square, enlarged or reduced; by a whole factor, its pixels stay squares."""
    height, width = image.shape[:2]
    factor = side / max(height, width)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    smooth = Image.Resampling.BOX if factor < 1 else Image.Resampling.BICUBIC
    drawn = Image.fromarray(np.broadcast_to(image, (height, width, 3)).copy())
    square = Image.new("RGB", (side, side), _BEHIND)
    square.paste(
        drawn.resize(size, Image.Resampling.NEAREST if factor.is_integer() else smooth),
        ((side - size[0]) // 2, (side - size[1]) // 2),
    )
    return np.asarray(square)


def sheet(rows: Sequence[Row], across: int = A_ROW) -> Pixels:
    """Draws titles with their tiles below, at most `across` side by side."""
    images = [tile.image for row in rows for tile in row.tiles if tile.image is not None]
    tile_width = max([image.shape[1] for image in images], default=SIDE)
    width = across * (tile_width + GAP) + GAP
    strips = [
        Row(row.title if not start else "", row.tiles[start : start + across])
        for row in rows
        for start in range(0, max(1, len(row.tiles)), across)
    ]
    picture = Image.new("RGB", (width, sum(map(_height, strips))), _BACKGROUND)
    draw = ImageDraw.Draw(picture)
    top = 0
    for strip in strips:
        below = top + (TITLE if strip.title else 0)
        title = _fitting(strip.title, 13, width - 2 * GAP, keep_end=False)
        draw.text((GAP, below - 5), title, _WHITE, _font(13), anchor="ls")
        for column, tile in enumerate(strip.tiles):
            _draw_tile(picture, draw, tile, GAP + column * (tile_width + GAP), below, tile_width)
        top += _height(strip)
    return np.asarray(picture)


def write(path: Path, picture: Pixels) -> None:
    """Writes RGB or grey pixels, (H, W, 3) or (H, W), in the format of the file's ending."""
    content = io.BytesIO()
    Image.fromarray(picture).save(content, format=Image.registered_extensions()[path.suffix.lower()])
    with replacing(path) as partial:
        partial.write_bytes(content.getvalue())


def check_name(flag: str, path: Path) -> None:
    """Raises ValueError, with the flag, for a path that cannot be written: before the work, not after."""
    findings.check_writable(path)
    if Image.registered_extensions().get(path.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"{flag} {path}: expected the name of a picture, like sheet.png")


def _height(strip: Row) -> int:
    tallest = max([len(tile.image) if tile.image is not None else SIDE for tile in strip.tiles], default=SIDE)
    lines = max([len(tile.caption) for tile in strip.tiles], default=0)
    return (TITLE if strip.title else 0) + tallest + CAPTION_LINE * lines + GAP


def _draw_tile(picture: Image.Image, draw: ImageDraw.ImageDraw, tile: Tile, left: int, top: int, width: int) -> None:
    if tile.image is None:
        right, below = left + SIDE - 1, top + SIDE
        draw.rectangle((left, top, right, below - 1), (0, 0, 0))
        draw.line((left, top, right, below - 1), RED)
        draw.line((left, below - 1, right, top), RED)
    else:
        picture.paste(Image.fromarray(tile.image), (left, top))
        below = top + len(tile.image)
    if tile.bar:
        draw.rectangle((left, top, left + width - 1, top + _BAR - 1), tile.bar)
    for number, line in enumerate(tile.caption, start=1):
        text = _fitting(line, CAPTION, width, keep_end=True)
        draw.text((left, below + number * CAPTION_LINE - 3), text, _GREY, _font(CAPTION), anchor="ls")


def _fitting(text: str, size: int, width: int, *, keep_end: bool) -> str:
    """Shortens a text to a width: keeps its end, which tells more of a file's name, or its beginning."""
    # Fonts lack the escapes of names that are not UTF-8, and tabs in names from tables.
    text = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    text = "".join(char if _has(char) else f"U+{ord(char):04X} " for char in text)
    shown = text
    while shown and _font(size).getlength(shown if shown == text else shown + "…") > width:
        shown = shown[1:] if keep_end else shown[:-1]
    return text if shown == text else f"…{shown}" if keep_end else f"{shown}…"


@cache
def _has(char: str) -> bool:
    """Tells whether the font has it, or would draw a box instead."""
    return char.isspace() or bytes(_font(10).getmask(char)) != bytes(_font(10).getmask("\uffff"))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Returns matplotlib's own font: Latin, Greek, Cyrillic."""
    return ImageFont.truetype(Path(import_matplotlib().get_data_path()) / "fonts/ttf/DejaVuSans.ttf", size)
