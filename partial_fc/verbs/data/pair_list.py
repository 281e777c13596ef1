"""Lists of image pairs: two paths, and whether they are of one class."""

import csv
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.image_folder import SUFFIXES
from partial_fc.embedding.sources import ImageFiles
from partial_fc.file_kind import TEXT, kind_of_file
from partial_fc.files import read_text

_KINDS = dict.fromkeys(("same", "1", "true", "yes"), True) | dict.fromkeys(("different", "0", "false", "no"), False)
# LFW's pairs.txt: `name n m` and `name n name m`; CALFW's and CPLFW's: `file fold`, two lines a pair, 0: different.
_BY_NAME, _BY_FILE = re.compile(r"(.+?)\s+(\d+)\s+(?:(\S.*?)\s+)?(\d+)"), re.compile(r"(\S+\.\w+)\s+(\d+)")
_FOLDS = 10
_Rows = list[tuple[str, str, bool]]


class PairList(NamedTuple):
    """Pairs of files. images: each once, by first use; first_N, second_N: indices; same_N: of one class. folds:
    consecutive parts of the list, each of which has its kinds of pairs mixed if the list is LFW's."""

    images: ImageFiles
    first_N: NDArray[np.int64]
    second_N: NDArray[np.int64]
    same_N: NDArray[np.bool_]
    folds: int = _FOLDS

    def digest(self) -> int:
        """Returns a checksum of the list, to compare it between hosts."""
        names = "\n".join(self.images.names).encode("utf-8", "surrogateescape")
        return zlib.crc32(self.same_N.tobytes(), zlib.crc32(self.first_N.tobytes() + self.second_N.tobytes() + names))


def read_pair_list(path: Path, root: Path | None = None) -> PairList:
    """Reads LFW's pairs.txt (view 1 or 2), CALFW's or CPLFW's, or one pair a line: `path,path,same` or
    `path,path,different` (or 1 and 0, true and false, yes and no), also with tabs or blanks for the commas, as the
    first line has them. Line 1 may be a header: no field of it is a path, with a dot or a slash, nor a file. Paths are
    relative to root, by default the list's folder. Raises ValueError for a bad line or a missing file."""
    root = root or path.parent
    if (kind := kind_of_file(path)) not in (TEXT, ""):
        raise ValueError(f"{path} is {kind}; expected a list of pairs, `path,path,same` or `different` a line")
    # Decoded as lists of images, without a byte-order mark.
    lines = read_text(path, encoding="utf-8-sig", errors="surrogateescape").splitlines()
    head = next(filter(str.strip, lines), "").split()
    counts = [int(word) for word in head] if len(head) < 3 and all(map(str.isdecimal, head)) else []
    folds = counts[0] if len(counts) == 2 and counts[0] > 1 else _FOLDS
    first_line = next(filter(str.strip, lines[bool(counts) :]), "").strip()
    rows: _Rows
    if of_faces := next((form for form in (_BY_NAME, _BY_FILE) if form.fullmatch(first_line)), None):
        rows = (_named if of_faces is _BY_NAME else _two_lines)(path, lines, 1 if counts else 0, root)
        if len(counts) == 2 and len(rows) != 2 * counts[0] * counts[1]:
            raise ValueError(f"{path}: {len(rows)} pairs; its first line says {counts[0]} folds of 2 x {counts[1]}")
        rows = [rows[at] for at in mixed(np.array([same for *_, same in rows]), folds).tolist()]
    else:
        rows = _listed(path, lines, root)
    if not rows:
        raise ValueError(f"{path} names no pairs; expected `path,path,same` or `path,path,different` a line")
    numbers: dict[str, int] = {}
    image_N2 = np.array([numbers.setdefault(name, len(numbers)) for *names, _ in rows for name in names]).reshape(-1, 2)
    if missing := [root / name for name in numbers if not (root / name).is_file()]:
        raise ValueError(
            f"{path}: {len(missing)} of its {len(numbers)} images are missing, the first is {missing[0]}; give "
            "the folder that its paths are relative to (--root)"
        )
    return PairList(ImageFiles(root, list(numbers)), *image_N2.T, np.array([row[2] for row in rows]), folds)


def mixed(same_N: NDArray[np.bool_], folds: int) -> NDArray[np.int64]:
    """Returns the order of pairs that mixes both kinds evenly within each of the folds, which are consecutive, so that
    the parts of any other number of folds have both, too."""
    order = []
    for of_fold in np.array_split(np.arange(len(same_N)), folds):
        place = np.empty(len(of_fold))
        for is_kind in (same_N[of_fold], ~same_N[of_fold]):
            place[is_kind] = (np.arange(is_kind.sum()) + 0.5) / max(1, is_kind.sum())
        order.append(of_fold[np.argsort(place, kind="stable")])
    return np.concatenate(order)


def _listed(path: Path, lines: list[str], root: Path) -> _Rows:
    first_line = next(filter(str.strip, lines), "")
    mark = next((mark for mark in (",", "\t", None) if len(_fields(first_line, mark)) == 3), ",")
    rows: _Rows = []
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
        rows.append((fields[0], fields[1], kind))
    return rows


def _named(path: Path, lines: list[str], skipped: int, root: Path) -> _Rows:
    """Returns LFW's pairs: image n of NAME is NAME/NAME_000n.jpg, or has another ending of an image."""

    def file(name: str, number: str) -> str:
        names = [f"{name}/{name}_{int(number):04d}{ending}" for ending in SUFFIXES]
        return next((each for each in names if (root / each).is_file()), names[0])

    rows: _Rows = []
    for number, line in enumerate(lines[skipped:], start=1 + skipped):
        match = _BY_NAME.fullmatch(line.strip())
        if match:
            rows.append((file(match[1], match[2]), file(match[3] or match[1], match[4]), match[3] is None))
        elif line.strip():
            raise ValueError(f"{path}, line {number}: expected `name n m` or `name n name m`, got {line[:200]!r}")
    return rows


def _two_lines(path: Path, lines: list[str], skipped: int, root: Path) -> _Rows:
    found = [_BY_FILE.fullmatch(line.strip()) for line in lines[skipped:] if line.strip()]
    rows = [(one[1], two[1], one[2] != "0") for one, two in zip(found[::2], found[1::2], strict=False)
            if one and two and one[2] == two[2]]  # fmt: skip
    if 2 * len(rows) != len(found):
        raise ValueError(f"{path}: expected `file fold` a line, and two lines of one fold for each pair (0: different)")
    return rows


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
