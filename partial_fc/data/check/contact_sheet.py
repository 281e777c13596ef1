"""A contact sheet of the images of a check, for a person to look at."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from partial_fc import pictures
from partial_fc.data.check.images import Read, decode_scanned
from partial_fc.data.sample import BadRecord
from partial_fc.findings import Describe, Finding
from partial_fc.pictures import A_ROW, Pixels, Row, Tile


@dataclass
class ContactSheet:
    """A row of the first images of each finding, and a row of images spread over each set. Each image has its name
    below it; one that cannot be decoded is a cross."""

    rows: list[tuple[Finding, Read]] = field(default_factory=list)

    def add(self, findings: list[Finding], read: Read, num_images: int, describe: Describe, file: str) -> None:
        """Adds the findings about the images of a set; read(index) gives an image, describe(index) its name."""
        self.rows += [(f, read) for f in findings if len(f.places) and f.key.startswith("image-")]
        spread = np.unique(np.linspace(0, num_images - 1, A_ROW).astype(np.int64))
        self.rows.append((Finding("info", f"some of {file}", "", num_images, spread, describe), read))

    def write(self, path: Path) -> str:
        """Writes the picture and returns a line about it. Raises ValueError without images, OSError if it fails."""
        if not self.rows:
            raise ValueError(f"{path}: not written, there is no image to show")
        pictures.write(path, pictures.sheet([_row(finding, read) for finding, read in self.rows]))
        return f"pictures: {path}"


def _row(finding: Finding, read: Read) -> Row:
    what = f": {finding.what}" if finding.what else ""
    places = [int(place) for place in finding.places[:A_ROW]]
    tiles = [Tile(_image(read, place), _caption(finding.describe(place))) for place in places]
    return Row(f"{finding.key} ({finding.count:,}){what}", tiles)


def _caption(place: Mapping[str, Any]) -> list[str]:
    """Returns the caption of a finding's image: file name or key first."""
    words = [
        str(value).rpartition("/")[2] if name == "file" else f"{name} {value}"
        for name, value in place.items()
        if name not in ("problem", "height", "width")
    ]
    size = [f"{place['width']} x {place['height']}"] if "height" in place else []
    return [*words[:1], ", ".join([*words[1:], *size])]


def _image(read: Read, index: int) -> Pixels | None:
    try:
        image = read(index)
        pixel = decode_scanned(image)[0] if isinstance(image, bytes) else image.repeat(4 - image.shape[2], 2)[..., :3]
        return pictures.fit(pixel)
    except BadRecord:
        return None
