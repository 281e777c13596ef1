"""Lists of image pairs: two paths, and whether they are of one class."""

import csv
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc.embedding.sources import ImageFiles
from partial_fc.files import read_text

_KINDS = dict.fromkeys(("same", "1", "true", "yes"), True) | dict.fromkeys(("different", "0", "false", "no"), False)


class PairList(NamedTuple):
    """Pairs of files. images: each once, by first use; first_N, second_N: indices; same_N: of one class."""

    images: ImageFiles
    first_N: NDArray[np.int64]
    second_N: NDArray[np.int64]
    same_N: NDArray[np.bool_]

    def digest(self) -> int:
        """Returns a checksum of the list, to compare it between hosts."""
        names = "\n".join(self.images.names).encode("utf-8", "surrogateescape")
        return zlib.crc32(self.same_N.tobytes(), zlib.crc32(self.first_N.tobytes() + self.second_N.tobytes() + names))


def read_pair_list(path: Path, root: Path | None = None) -> PairList:
    """Reads one pair a line: `path,path,same` or `path,path,different` (or 1 and 0, true and false, yes and no), also
    with tabs or blanks for the commas, as the first line has them. Line 1 may be a header: no field of it is a path,
    with a dot or a slash, nor a file. Paths are relative to root, by default the list's folder. Raises ValueError for a
    bad line or a missing file."""
    root = root or path.parent
    # Decoded as lists of images, without a byte-order mark.
    lines = read_text(path, encoding="utf-8-sig", errors="surrogateescape").splitlines()
    first_line = next(filter(str.strip, lines), "")
    mark = next((mark for mark in (",", "\t", None) if len(_fields(first_line, mark)) == 3), ",")
    numbers: dict[str, int] = {}
    rows: list[tuple[int, int, bool]] = []
    for number, line in enumerate(lines, start=1):
        fields = _fields(line, mark)
        if not any(fields) or (number == 1 and _is_header(fields, root)):
            continue
        kind = _KINDS.get(fields[2].lower()) if len(fields) == 3 else None
        if kind is None or not fields[0] or not fields[1] or "\0" in line:
            raise ValueError(
                f"{path}, line {number}: expected `path,path,same` or `different` (1 or 0; or with tabs or blanks for "
                f"the commas), got {line[:200]!r}"
            )
        first, second = (numbers.setdefault(name, len(numbers)) for name in fields[:2])
        rows.append((first, second, kind))
    if not rows:
        raise ValueError(f"{path} names no pairs; expected `path,path,same` or `path,path,different` a line")
    if missing := [root / name for name in numbers if not (root / name).is_file()]:
        raise ValueError(
            f"{path}: {len(missing)} of its {len(numbers)} images are missing, the first is {missing[0]}; give "
            "the folder that its paths are relative to (--root)"
        )
    first_N, second_N, same_N = (np.array(column) for column in zip(*rows, strict=True))
    return PairList(ImageFiles(root, list(numbers)), first_N, second_N, same_N)


def _fields(line: str, mark: str | None) -> list[str]:
    """Splits a line; mark: None: blanks."""
    fields = next(csv.reader([line], delimiter=mark, skipinitialspace=True), []) if mark else line.split()
    return [field.strip() for field in fields]


def _is_header(fields: list[str], root: Path) -> bool:
    return (
        len(fields) == 3
        and fields[2] not in ("0", "1")
        and not any("." in f or "/" in f or (root / f).exists() for f in fields[:2])
    )
