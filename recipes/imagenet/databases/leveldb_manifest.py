"""Reader of a LevelDB's MANIFEST: lists the database's files without opening it.

CURRENT names the MANIFEST, a log of edits to the set of tables. (LevelDB's doc/log_format.md and db/version_edit.cc.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from partial_fc.files import read_bytes

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4
_LOG, _DELETED, _NEW, _PREVIOUS_LOG = 2, 6, 7, 9
# Fields of an edit by tag: n, a varint; t, a length-prefixed text.
_FIELDS = {1: "t", _LOG: "n", 3: "n", 4: "n", 5: "nt", _DELETED: "nn", _NEW: "nnntt", _PREVIOUS_LOG: "n"}
_CURRENT_BYTES, _MOST_BYTES = 4096, 1 << 30  # of the files CURRENT and MANIFEST
_SEQUENCE_BYTES = 8  # at the end of a key in a table


@dataclass(frozen=True)
class Table:
    """A table file. num_bytes: of the file. smallest, largest: keys."""

    path: Path
    num_bytes: int
    smallest: bytes
    largest: bytes


@dataclass(frozen=True)
class Manifest:
    """The live files of a LevelDB. path: of the MANIFEST. logs: files with records that are in no table yet."""

    path: Path
    tables: list[Table]
    logs: list[Path]

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self.tables) + sum(log.stat().st_size for log in self.logs)

    @property
    def overlapping_bytes(self) -> int:
        """Returns the bytes of tables whose key ranges overlap: LevelDB may rewrite them when opened."""
        tables = sorted(self.tables, key=lambda table: table.smallest)
        ends = list(accumulate((table.largest for table in tables), max))
        joins = [False, *(table.smallest <= end for table, end in zip(tables[1:], ends, strict=False)), False]
        shares = [before or after for before, after in pairwise(joins)]  # overlaps the table before or after it
        return sum(table.num_bytes for table, overlaps in zip(tables, shares, strict=False) if overlaps)


def read_manifest(folder: Path) -> Manifest:
    """Reads the MANIFEST of a folder. Raises ValueError if a file is missing, cut short, or not LevelDB's."""
    name = read_bytes(folder / "CURRENT", _CURRENT_BYTES)
    path = folder / name.strip().decode("utf-8", "replace")
    if not name.startswith(b"MANIFEST-") or not path.is_file():
        raise ValueError(
            f"{folder / 'CURRENT'} names {name[:40]!r}; expected a file MANIFEST-NUMBER beside it: copy it again"
        )
    tables: dict[int, Table] = {}
    log = {_LOG: 0, _PREVIOUS_LOG: 0}
    for edit in _edits(read_bytes(path, _MOST_BYTES)):
        for tag, values in _fields(edit, path):
            if tag in log:
                log[tag] = values[0]
            elif tag == _DELETED:
                tables.pop(values[1], None)
            elif tag == _NEW:
                _, number, size, smallest, largest = values
                file = folder / f"{number:06d}.ldb"
                tables[number] = Table(file, size, smallest[:-_SEQUENCE_BYTES], largest[:-_SEQUENCE_BYTES])
    present = [_present(table) for _, table in sorted(tables.items())]
    logs = {int(file.stem): file for file in folder.glob("*.log") if file.stem.isdigit()}
    needed = [file for number, file in sorted(logs.items()) if number >= log[_LOG] or number == log[_PREVIOUS_LOG]]
    return Manifest(path, present, needed)


def _present(table: Table) -> Table:
    """Returns the table with its actual file name: older ones end in .sst."""
    for path in (table.path, table.path.with_suffix(".sst")):
        if path.is_file():
            if path.stat().st_size != table.num_bytes:
                raise ValueError(
                    f"{path} has {path.stat().st_size} bytes, the MANIFEST says {table.num_bytes}: copy it again"
                )
            return Table(path, table.num_bytes, table.smallest, table.largest)
    raise ValueError(f"{table.path} (or .sst) is missing, which the MANIFEST lists: copy it again")


def _edits(content: bytes) -> Iterator[bytes]:
    """Yields the records of a log. Drops one that a crash cut off at the end, as LevelDB does."""
    at, pieces = 0, b""
    while at + _HEADER <= len(content):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        piece = content[at + _HEADER : at + _HEADER + length]
        if len(piece) < length:
            return
        at += _HEADER + length
        pieces = piece if kind in (_FULL, _FIRST) else pieces + piece
        if kind in (_FULL, _LAST):
            yield pieces


def _fields(edit: bytes, path: Path) -> Iterator[tuple[int, list]]:
    """Yields each tag of an edit with its values."""
    at = 0

    def number() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            if at >= len(edit):
                break
            byte = edit[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError(f"{path} is damaged: copy it again")

    def text() -> bytes:
        nonlocal at
        length = number()
        if at + length > len(edit):
            raise ValueError(f"{path} is damaged: copy it again")
        at += length
        return edit[at - length : at]

    while at < len(edit):
        tag = number()
        if tag not in _FIELDS:
            raise ValueError(f"{path}: field {tag} is not LevelDB's; did RocksDB write it? Only LevelDB is read")
        yield tag, [number() if kind == "n" else text() for kind in _FIELDS[tag]]
