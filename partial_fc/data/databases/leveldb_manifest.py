"""Which files make up a LevelDB: its MANIFEST, read without opening the database.

CURRENT names the MANIFEST, a log of edits to the set of tables. (LevelDB's doc/log_format.md and db/version_edit.cc.)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from partial_fc.files import read_bytes

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# Tags of an edit.
_COMPARATOR, _LOG, _NEXT_FILE, _LAST_SEQUENCE, _COMPACT_POINTER, _DELETED, _NEW, _PREVIOUS_LOG = 1, 2, 3, 4, 5, 6, 7, 9
_CURRENT_BYTES, _MOST_BYTES = 4096, 1 << 30  # of the files CURRENT and MANIFEST
_SEQUENCE_BYTES = 8  # at the end of a key in a table


@dataclass(frozen=True)
class Table:
    """num_bytes: of the file. smallest, largest: keys."""

    path: Path
    num_bytes: int
    smallest: bytes
    largest: bytes


@dataclass
class Manifest:
    """path: of the MANIFEST. logs: not yet in any table."""

    path: Path
    tables: list[Table] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self.tables) + sum(log.stat().st_size for log in self.logs)

    @property
    def overlapping_bytes(self) -> int:
        """The size of the tables that share a stretch of keys with others: LevelDB may write them anew when opened."""
        total, group_bytes, group_size, end = 0, 0, 0, b""
        for table in sorted(self.tables, key=lambda table: table.smallest):
            if group_size and table.smallest <= end:
                group_bytes, group_size, end = group_bytes + table.num_bytes, group_size + 1, max(end, table.largest)
                continue
            total += group_bytes if group_size > 1 else 0
            group_bytes, group_size, end = table.num_bytes, 1, table.largest
        return total + (group_bytes if group_size > 1 else 0)


def read_manifest(folder: Path) -> Manifest:
    """Raises ValueError where a file is missing, cut short, or not LevelDB's."""
    name = read_bytes(folder / "CURRENT", _CURRENT_BYTES)
    path = folder / name.strip().decode("utf-8", "replace")
    if not name.startswith(b"MANIFEST-") or not path.is_file():
        raise ValueError(
            f"{folder / 'CURRENT'} names {name[:40]!r}; expected a file MANIFEST-NUMBER beside it: copy it again"
        )
    live: dict[int, tuple[int, bytes, bytes]] = {}
    log, previous_log = 0, 0
    for edit in _edits(read_bytes(path, _MOST_BYTES)):
        reader = _Reader(edit, path)
        while not reader.at_end:
            tag = reader.number()
            if tag in (_NEXT_FILE, _LAST_SEQUENCE):
                reader.number()
            elif tag == _LOG:
                log = reader.number()
            elif tag == _PREVIOUS_LOG:
                previous_log = reader.number()
            elif tag == _COMPARATOR:
                reader.text()
            elif tag == _COMPACT_POINTER:
                reader.number(), reader.text()
            elif tag == _DELETED:
                reader.number()
                live.pop(reader.number(), None)
            elif tag == _NEW:
                reader.number()
                number, size = reader.number(), reader.number()
                live[number] = (size, reader.text()[:-_SEQUENCE_BYTES], reader.text()[:-_SEQUENCE_BYTES])
            else:
                raise ValueError(f"{path}: field {tag} is not LevelDB's; did RocksDB write it? Only LevelDB is read")
    tables = [Table(_table(folder, number, entry[0]), *entry) for number, entry in sorted(live.items())]
    logs = {int(file.stem): file for file in folder.glob("*.log") if file.stem.isdigit()}
    needed = [file for number, file in sorted(logs.items()) if number >= log or number == previous_log]
    return Manifest(path, tables, needed)


def _table(folder: Path, number: int, size: int) -> Path:
    for ending in ("ldb", "sst"):
        path = folder / f"{number:06d}.{ending}"
        if path.is_file():
            if path.stat().st_size != size:
                raise ValueError(f"{path} has {path.stat().st_size} bytes, the MANIFEST says {size}: copy it again")
            return path
    raise ValueError(f"{folder / f'{number:06d}.ldb'} (or .sst) is missing, which the MANIFEST lists: copy it again")


def _edits(content: bytes) -> Iterator[bytes]:
    """The records of a log; one that a crash cut off at the end is left out, as LevelDB does."""
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


class _Reader:
    """Numbers of 7 bits a byte, and texts with their length before them."""

    def __init__(self, content: bytes, path: Path):
        self._content, self._at, self._path = content, 0, path

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._content)

    def number(self) -> int:
        value, shift = 0, 0
        while True:
            if self.at_end or shift > 63:
                raise ValueError(f"{self._path} is damaged: copy it again")
            byte = self._content[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def text(self) -> bytes:
        length = self.number()
        if self._at + length > len(self._content):
            raise ValueError(f"{self._path} is damaged: copy it again")
        self._at += length
        return self._content[self._at - length : self._at]
