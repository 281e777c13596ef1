"""Caffe2's minidb files (.mdl checkpoints, `--db_type minidb`): a sequence of key-value pairs.

    repeated: [int32 length of the key][int32 length of the value][key][value], little-endian, nothing aligned

(Field order: MiniDBTransaction::Put in caffe2/core/db.cc, which writes native byte order; x86 and ARM are
little-endian.)
"""

import os
import struct
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from partial_fc.data.sample import BadRecord
from partial_fc.files import regular, replacing

_LENGTHS = struct.Struct("<ii")
_MAX_LENGTH = 2**31 - 1


def read(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yields (key, value) in file order, one at a time in memory. Raises as MinidbStore."""
    store = MinidbStore(path)
    return map(store.item, range(len(store)))


def write(path: Path, items: Iterable[tuple[bytes, bytes]]) -> None:
    """Writes (key, value) pairs in this order, atomically and synced to disk. Raises ValueError if one is empty or
    longer than an int32 can say."""
    with replacing(path, durable=True) as partial, partial.open("wb") as file:
        for key, value in items:
            if not key or max(len(key), len(value)) > _MAX_LENGTH:
                raise ValueError(
                    f"{path}, key {key[:80]!r}: {len(key)} bytes of key, {len(value)} of value; a minidb file holds "
                    f"keys of at least 1 and neither of more than {_MAX_LENGTH}"
                )
            file.write(_LENGTHS.pack(len(key), len(value)))
            file.write(key)
            file.write(value)


class MinidbStore:
    """A minidb as a store. Lists the records' offsets at the start; values stay on disk. Raises ValueError with the
    offset for a file that is no minidb, empty or cut short."""

    kind = "minidb"

    def __init__(self, path: Path):
        self.path = path
        self._edges = np.fromiter(_edges(path), np.int64)
        self._file = regular(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._edges) - 1

    def item(self, index: int) -> tuple[bytes, bytes]:
        """Returns (key, value) of the index-th record in file order. Raises BadRecord for a disk error."""
        start, end = map(int, self._edges[index : index + 2])
        content = os.pread(self._file, end - start, start)
        if len(content) != end - start:
            raise BadRecord(
                f"{self.path}, byte {start}: the file ends within this record: it was truncated after it was opened"
            )
        value = _LENGTHS.size + _LENGTHS.unpack_from(content)[0]
        return content[_LENGTHS.size : value], content[value:]


def _edges(path: Path) -> Iterator[int]:
    """Yields the offset of each pair, and then the file's size; reads no values."""
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise ValueError(f"{path} is empty; expected a minidb file")
        start = 0
        while start < size:
            yield start
            file.seek(start)
            head = file.read(_LENGTHS.size)
            key_length, value_length = _LENGTHS.unpack(head) if len(head) == _LENGTHS.size else (0, 0)
            end = start + _LENGTHS.size + key_length + value_length
            if key_length < 1 or value_length < 0 or end > size:
                raise ValueError(
                    f"{path}, byte {start}: expected a key of at least 1 byte and a value within the {size} bytes of "
                    f"the file; got lengths {key_length} and {value_length}. It is cut short, or no minidb file"
                )
            start = end
        yield size
