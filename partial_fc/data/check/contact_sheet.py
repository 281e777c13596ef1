"""One picture of the images of a check, for a person to look at."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from partial_fc.data.check.decoder_stderr import DecoderStderr
from partial_fc.data.decode import decode, fit
from partial_fc.data.sample import BadRecord
from partial_fc.findings import Describe, Finding, place_text

_SIDE, _A_ROW, _TITLE = 112, 10, 22  # pixels, images, pixels
_WHITE, _RED = (255, 255, 255), (0, 0, 255)


@dataclass
class ContactSheet:
    """A row for each finding about images, with its first ones, and a row of images from all over each set. One that
    cannot be decoded is a black tile with a cross and its name."""

    rows: list[tuple[Finding, Callable[[int], bytes]]] = field(default_factory=list)

    def add(
        self, findings: list[Finding], read: Callable[[int], bytes], num_images: int, describe: Describe, file: str
    ) -> None:
        """The findings about the images of a set; read(index) gives the file of one, describe(index) its name."""
        self.rows += [(f, read) for f in findings if len(f.places) and f.key.startswith("image-")]
        spread = np.unique(np.linspace(0, num_images - 1, _A_ROW).astype(np.int64))
        self.rows.append((Finding("info", f"some of {file}", "", num_images, spread, describe), read))

    def write(self, path: Path) -> str:
        """Says what was written. ValueError where the file cannot be, or there is no image."""
        if not self.rows:
            raise ValueError(f"{path}: not written, there is no image to show")
        with DecoderStderr():  # the decoder has said it all before
            picture = np.concatenate([_row(finding, read) for finding, read in self.rows])
        if not cv2.imwrite(str(path), picture):
            raise ValueError(
                f"{path}: cannot be written; expected a file name like sheet.png in a folder that is there"
            )
        return f"pictures: {path}"


def _row(finding: Finding, read: Callable[[int], bytes]) -> NDArray[np.uint8]:
    row = np.zeros((_TITLE + _SIDE, _A_ROW * _SIDE, 3), np.uint8)
    title = f"{finding.key}: {finding.count:,}"
    cv2.putText(row, title, (4, _TITLE - 6), cv2.FONT_HERSHEY_SIMPLEX, 0.5, _WHITE, 1, cv2.LINE_AA)
    for column, index in enumerate(finding.places[:_A_ROW]):
        try:
            tile = fit(decode(read(int(index))), _SIDE)[..., ::-1]
        except BadRecord:
            place = {name: value for name, value in finding.describe(int(index)).items() if name != "problem"}
            tile = _unusable(place_text(place))
        row[_TITLE:, column * _SIDE : (column + 1) * _SIDE] = tile
    return row


def _unusable(name: str) -> NDArray[np.uint8]:
    """A black tile with a cross and the end of a name, which says more than its beginning."""
    tile = np.zeros((_SIDE, _SIDE, 3), np.uint8)
    for side in (0, _SIDE):
        cv2.line(tile, (side, 0), (_SIDE - side, _SIDE), _RED, 1)
    width, height = 17, 13  # characters that fit a line, pixels of one
    shown = name[-width * (_SIDE // height - 1) :]
    for number, start in enumerate(range(0, len(shown), width), start=1):
        line = shown[start : start + width]
        cv2.putText(tile, line, (2, number * height), cv2.FONT_HERSHEY_PLAIN, 0.7, _WHITE, 1, cv2.LINE_AA)
    return tile
