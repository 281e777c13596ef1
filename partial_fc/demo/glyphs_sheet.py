"""A picture of a glyph set for a person to look at: strokes cut off? characters missing? labels right?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import cv2
import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc.data.decode import decode
from partial_fc.data.pairs import Pairs, read_pairs
from partial_fc.data.recordio import RecordReader, unpack
from partial_fc.demo.glyphs_pairs import SETS
from partial_fc.flags.numbers import check_numbers

_PAIRS_A_ROW = 10
_GAP = 6  # pixels between blocks
_CAPTION = 20  # pixels


@dataclass(frozen=True)
class SheetOptions:
    """Draws a picture of a glyph set. Above: classes, one a row, with all images of each. Below, for each
    verification set: genuine pairs on the left, impostors on the right, the first image of a pair above the second.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """A finished set, as `partial-fc data glyphs` makes it."""
    png: Annotated[Path, tyro.conf.Positional]
    """The picture to write."""
    num_rows: int = 12
    """Classes to show."""

    def __post_init__(self) -> None:
        check_numbers(self, num_rows="[2, 10000]")


def contact_sheet(options: SheetOptions) -> None:
    """Writes options.png. ValueError where the set is not there or the file cannot be written."""
    blocks = [_captioned("training: one class a row", _grid(_classes(options.folder / "train.rec", options.num_rows)))]
    for name in SETS:
        pairs = read_pairs(options.folder / f"{name}.bin")
        halves = [
            _captioned(f"{name}: {answer}", _grid(_rows_of(pairs, same, options.num_rows // 2)))
            for same, answer in ((True, "one character"), (False, "two characters"))
        ]
        blocks.append(_stack(halves, axis=1))
    if not cv2.imwrite(str(options.png), _stack(blocks, axis=0)):
        raise ValueError(f"{options.png}: cannot be written")


def _classes(rec_path: Path, num_rows: int) -> list[list[bytes]]:
    with RecordReader(rec_path) as records:
        first_class_key, end_class_key = (int(key) for key in unpack(records.read(0))[0].label)
        rows = []
        for key in range(first_class_key, min(first_class_key + num_rows, end_class_key)):
            first, end = (int(image_key) for image_key in unpack(records.read(key))[0].label)
            rows.append([unpack(records.read(image_key))[1] for image_key in range(first, end)])
        return rows


def _rows_of(pairs: Pairs, same: bool, num_rows: int) -> list[list[bytes]]:
    chosen = np.flatnonzero(pairs.same == same)[: _PAIRS_A_ROW * num_rows]
    parts = [chosen[i : i + _PAIRS_A_ROW] for i in range(0, len(chosen), _PAIRS_A_ROW)]
    return [[pairs.images[2 * i + which] for i in part] for part in parts for which in (0, 1)]


def _captioned(caption: str, block: NDArray[np.uint8]) -> NDArray[np.uint8]:
    bar = np.zeros((_CAPTION, block.shape[1], 3), np.uint8)
    cv2.putText(bar, caption, (4, _CAPTION - 6), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (255, 255, 255), 1, cv2.LINE_AA)
    return np.concatenate((bar, block))


def _grid(rows: list[list[bytes]]) -> NDArray[np.uint8]:
    return _stack([np.concatenate([decode(file) for file in row], axis=1) for row in rows], axis=0, gap=0)


def _stack(blocks: list[NDArray[np.uint8]], axis: int, gap: int = _GAP) -> NDArray[np.uint8]:
    """Puts blocks below each other (axis 0) or side by side (axis 1), smaller ones filled up with black."""
    across = max(block.shape[1 - axis] for block in blocks)
    padded = []
    for block in blocks:
        margin = [(0, 0), (0, 0), (0, 0)]
        margin[axis], margin[1 - axis] = (0, gap), (0, across - block.shape[1 - axis])
        padded.append(np.pad(block, margin))
    return np.concatenate(padded, axis=axis)
