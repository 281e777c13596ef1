"""CSV files of image pairs: two paths, and whether they are of one class."""

import csv
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc.embedding.sources import ImageFiles
from partial_fc.files import read_text

_KINDS = {
    "same": True,
    "1": True,
    "true": True,
    "yes": True,
    "different": False,
    "0": False,
    "false": False,
    "no": False,
}


class PairList(NamedTuple):
    """Pairs of files. images: each once, by first use; first_N, second_N: indices; same_N: of one class."""

    images: ImageFiles
    first_N: NDArray[np.int64]
    second_N: NDArray[np.int64]
    same_N: NDArray[np.bool_]

    def digest(self) -> int:
        """Returns a checksum of the whole list, to compare it between hosts."""
        names = "\n".join(self.images.names).encode("utf-8", "surrogateescape")
        return zlib.crc32(self.same_N.tobytes(), zlib.crc32(self.first_N.tobytes() + self.second_N.tobytes() + names))


def read_pair_list(path: Path, root: Path | None = None) -> PairList:
    """Reads one pair a line: `path,path,same` or `path,path,different` (or 1 and 0, true and false, yes and no; tabs in
    a file without commas). Line 1 may be a header: no field of it is a path, with a dot or a slash, nor a file. Paths
    are relative to root, by default the CSV file's folder. Raises ValueError for a bad line or a missing file."""
    root = root or path.parent
    # Decoded as lists of images, without a byte-order mark.
    text = read_text(path, encoding="utf-8-sig", errors="surrogateescape")
    delimiter = "," if "," in text or "\t" not in text else "\t"
    numbers: dict[str, int] = {}
    rows: list[tuple[int, int, bool]] = []
    reader = csv.reader(text.splitlines(), delimiter=delimiter, skipinitialspace=True)
    for fields in reader:
        fields = [field.strip() for field in fields]
        if not any(fields) or (reader.line_num == 1 and _is_header(fields, root)):
            continue
        kind = _KINDS.get(fields[2].lower()) if len(fields) == 3 else None
        if kind is None or not fields[0] or not fields[1] or any("\0" in field for field in fields):
            raise ValueError(
                f"{path}, line {reader.line_num}: expected `path{delimiter}path{delimiter}same` or `different` "
                f"(1 or 0), got {delimiter.join(fields)[:200]!r}"
            )
        first, second = (numbers.setdefault(name, len(numbers)) for name in fields[:2])
        rows.append((first, second, kind))
    if not rows:
        raise ValueError(f"{path} names no pairs; expected `path,path,same` or `path,path,different` a line")
    if missing := [root / name for name in numbers if not (root / name).is_file()]:
        raise ValueError(
            f"{path}: {len(missing)} of its {len(numbers)} images are not there, the first is {missing[0]}; --root "
            "says what its paths are relative to"
        )
    first_N, second_N, same_N = (np.array(column) for column in zip(*rows, strict=True))
    return PairList(ImageFiles(root, list(numbers)), first_N, second_N, same_N)


def _is_header(fields: list[str], root: Path) -> bool:
    return len(fields) == 3 and not any("." in f or "/" in f or (root / f).exists() for f in fields[:2])
