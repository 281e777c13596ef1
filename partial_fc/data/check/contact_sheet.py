"""One picture of the images that the doctor found suspicious, for a person to look at."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from partial_fc.data.check.decoder_stderr import Complaints
from partial_fc.data.decode import decode, fit
from partial_fc.data.sample import BadRecord
from partial_fc.findings import Finding

_SIDE, _A_ROW, _TITLE = 112, 10, 22  # pixels, images, pixels


@dataclass
class Sheet:
    """A row for each finding: its name and its first images. A black one with a cross cannot be used."""

    rows: list[tuple[Finding, Callable[[int], bytes]]] = field(default_factory=list)

    def add(self, found: list[Finding], read: Callable[[int], bytes]) -> None:
        """read(place) gives the file at a place of these findings that are about images."""
        self.rows += [(f, read) for f in found if len(f.places) and f.key.startswith("image-")]

    def write(self, path: Path, looked: int) -> str:
        """Says what was written; looked: of how many images. ValueError where the file cannot be."""
        if not self.rows:
            return f"{path}: not written, none of {looked:,} images is suspicious"
        with Complaints():  # the decoder has said it all before
            picture = np.concatenate([_row(finding, read) for finding, read in self.rows])
        if not cv2.imwrite(str(path), picture):
            raise ValueError(
                f"{path}: cannot be written; expected a file name like sheet.png in a folder that is there"
            )
        return f"pictures: {path}"


def _row(finding: Finding, read: Callable[[int], bytes]) -> NDArray[np.uint8]:
    row = np.zeros((_TITLE + _SIDE, _A_ROW * _SIDE, 3), np.uint8)
    title = f"{finding.key}: {finding.count:,}"
    cv2.putText(row, title, (4, _TITLE - 6), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (255, 255, 255), 1, cv2.LINE_AA)
    for column, place in enumerate(finding.places[:_A_ROW]):
        try:
            image = fit(decode(read(int(place))), _SIDE)[..., ::-1]
        except BadRecord:
            image = np.zeros((_SIDE, _SIDE, 3), np.uint8)
            for side in (0, _SIDE):
                cv2.line(image, (side, 0), (_SIDE - side, _SIDE), (0, 0, 255), 1)
        row[_TITLE:, column * _SIDE : (column + 1) * _SIDE] = image
    return row
