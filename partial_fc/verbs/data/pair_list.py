"""Lists of image pairs: two paths, and whether they are of one class."""

import csv
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
    numbered = [(number, _words(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    counts = [int(word) for word in numbered[0][1] if word.isdecimal()] if numbered else []
    of_faces = numbered[1 if len(counts) == len(numbered[0][1]) <= 2 else 0 :] if numbered else []
    folds = _FOLDS
    if of_faces and (len(of_faces[0][1]) == 2 or _is_named(of_faces[0][1])) and of_faces[0][1][-1].isdecimal():
        rows = (_named if _is_named(of_faces[0][1]) else _two_lines)(path, of_faces, root)
        if len(of_faces) < len(numbered) and len(counts) == 2:
            folds = max(2, counts[0])
            if len(rows) != 2 * counts[0] * counts[1]:
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
    return PairList(
        ImageFiles(root, list(numbers)), image_N2[:, 0], image_N2[:, 1], np.array([row[2] for row in rows]), folds
    )


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


def _words(line: str) -> list[str]:
    return [word.strip() for word in line.strip().split("\t" if "\t" in line.strip() else None)]


def _is_named(words: list[str]) -> bool:
    return len(words) in (3, 4) and words[1].isdecimal() and words[-1].isdecimal()


def _named(path: Path, numbered: list[tuple[int, list[str]]], root: Path) -> _Rows:
    """Returns LFW's pairs, `name n m` and `name n name m`: image n is NAME/NAME_000n.jpg, or of another ending."""

    def file(name: str, number: str) -> str:
        names = [f"{name}/{name}_{number.zfill(4)}{ending}" for ending in SUFFIXES]
        return next((each for each in names if (root / each).is_file()), names[0])

    for number, words in numbered:
        if not _is_named(words):
            raise ValueError(f"{path}, line {number}: expected `name n m` or `name n name m`, got {words}")
    return [(file(*words[:2]), file(words[-2] if len(words) == 4 else words[0], words[-1]), len(words) == 3)
            for _, words in numbered]  # fmt: skip


def _two_lines(path: Path, numbered: list[tuple[int, list[str]]], root: Path) -> _Rows:
    """Returns CALFW's and CPLFW's pairs, `file fold` on two lines each; fold 0: different."""
    found = [words for _, words in numbered]
    if len(found) % 2 or any(
        one[1:] != two[1:] or len(one) != 2 for one, two in zip(found[::2], found[1::2], strict=True)
    ):
        raise ValueError(f"{path}: expected `file fold` a line, and two lines of one fold for each pair (0: different)")
    return [(one[0], two[0], one[1] != "0") for one, two in zip(found[::2], found[1::2], strict=True)]


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
