"""MXNet RecordIO (train.rec, train.idx) without MXNet: the file format, not what the records mean.

A file is a sequence of frames, each starting at a multiple of 4 bytes, little-endian:
    uint32 0xCED7230A | uint32 part << 29 | length | payload | zeros up to a multiple of 4
part is 0 for a whole record. A payload that holds the magic number at a multiple of 4 would confuse a
scanner, so the writer splits it there and leaves those 4 bytes out: parts 1, 2, ..., 2, 3, which the reader
joins with the magic number between them. The index is text, one line a record: `key<TAB>offset`, the offset
being that of the record's first frame.

A payload starts with a label header (`pack`, `unpack`), 24 bytes `<IfQQ`: flag, label, id, id2. Where
flag > 0, that many float32 labels follow and the label field means nothing; then comes the image file.
Source of the format: dmlc-core `recordio.h`, `recordio.cc`; MXNet `python/mxnet/recordio.py`.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.record_index import read_index
from partial_fc.data.sample import BadRecord
from partial_fc.files import replacing

MAGIC = 0xCED7230A
MAX_RECORD_BYTES = 2**29 - 1
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)


class Header(NamedTuple):
    """The label header of a record. label: float32 (n,); a header of flag 0 gives n = 1."""

    flag: int
    label: NDArray[np.float32]
    id: int
    id2: int


def pack(label: float | Sequence[float] | NDArray[np.float32], content: bytes, id: int = 0, id2: int = 0) -> bytes:
    """A number is stored as flag 0, a sequence of n numbers as flag n; same bytes as mx.recordio.pack."""
    if isinstance(label, (int, float, np.number)):
        return _HEADER.pack(0, label, id, id2) + content
    array = np.asarray(label, dtype="<f4")
    return _HEADER.pack(array.size, 0.0, id, id2) + array.tobytes() + content


def unpack(record: bytes) -> tuple[Header, bytes]:
    """The label header and what follows it (empty in the header records of InsightFace)."""
    if len(record) < _HEADER.size:
        raise BadRecord(f"label header cut off: got {len(record)} bytes, expected at least {_HEADER.size}")
    flag, label, id, id2 = _HEADER.unpack_from(record)
    start = _HEADER.size + 4 * flag
    if len(record) < start:
        raise BadRecord(f"label header cut off: got {len(record)} bytes, flag {flag} needs at least {start}")
    if flag == 0:
        return Header(0, np.array([label], np.float32), id, id2), record[start:]
    return Header(flag, np.frombuffer(record, "<f4", flag, _HEADER.size), id, id2), record[start:]


class RecordWriter:
    """Writes NAME.rec and NAME.idx byte for byte as mx.recordio.MXIndexedRecordIO does.

    Both files appear under their names only when the writer closes without an exception, so an interrupted
    run never leaves a file that looks complete.
    """

    def __init__(self, rec_path: str | os.PathLike[str]) -> None:
        self.rec_path = Path(rec_path)
        self.idx_path = self.rec_path.with_suffix(".idx")
        self._files = ExitStack()
        idx, rec = (self._files.enter_context(replacing(path)) for path in (self.idx_path, self.rec_path))
        self._rec: IO[bytes] = self._files.enter_context(rec.open("wb"))
        self._idx: IO[str] = self._files.enter_context(idx.open("w", newline="\n"))
        self._offset = 0

    def write(self, key: int, record: bytes) -> None:
        if len(record) > MAX_RECORD_BYTES:
            raise ValueError(
                f"{self.rec_path}, key {key}: record of {len(record)} bytes; RecordIO holds at most {MAX_RECORD_BYTES}"
            )
        self._idx.write(f"{key}\t{self._offset}\n")
        starts = _aligned_magics(record)
        begin = 0
        for i, cut in enumerate(starts):
            self._write_part(_FIRST if i == 0 else _MIDDLE, record[begin:cut])
            begin = cut + len(_MAGIC_BYTES)
        self._write_part(_LAST if starts else _WHOLE, record[begin:])

    def _write_part(self, part: int, content: bytes) -> None:
        padding = -len(content) % 4
        self._rec.write(_FRAME.pack(MAGIC, part << 29 | len(content)))
        self._rec.write(content)
        self._rec.write(bytes(padding))
        self._offset += _FRAME.size + len(content) + padding

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)


class RecordReader:
    """Random access to the records of one .rec file by key. Any number of threads may read at the same time.

    The file is mapped, not read: opening costs the index only, and processes of one machine share the pages.
    The index is kept as arrays: 8 bytes a record where the keys are 0, 1, 2, ..., else 16.
    """

    def __init__(self, rec_path: str | os.PathLike[str], idx_path: str | os.PathLike[str] | None = None) -> None:
        self.rec_path = Path(rec_path)
        self.idx_path = Path(idx_path) if idx_path is not None else self.rec_path.with_suffix(".idx")
        if not self.idx_path.exists():
            raise ValueError(
                f"{self.idx_path} not found; it tells where each record of {self.rec_path} starts. "
                f"Make it anew: partial-fc data index {self.rec_path}"
            )
        with open(self.rec_path, "rb") as file:
            self._size = os.fstat(file.fileno()).st_size
            if self._size == 0:
                raise ValueError(f"{self.rec_path} is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # Records are read in random order: reading ahead of one would fetch many times what is used.
        self._map.madvise(mmap.MADV_RANDOM)
        keys, self._offsets = read_index(self.idx_path)
        self._check_offsets(keys)
        self._mean_bytes = self._size // len(keys)
        self.keys: NDArray[np.int64] | range = keys
        if keys[0] == 0 and keys[-1] == len(keys) - 1:  # sorted and unique: 0, 1, 2, ...
            self.keys = range(len(keys))

    def _check_offsets(self, keys: NDArray[np.int64]) -> None:
        bad = (self._offsets < 0) | (self._offsets % 4 != 0) | (self._offsets > self._size - _FRAME.size)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{self.idx_path}: key {keys[row]} has offset {self._offsets[row]}; expected a multiple of 4 "
                f"below {self._size}, the size of {self.rec_path}. {int(bad.sum())} of {len(keys)} are "
                f"wrong: the record file is cut short, or the index belongs to another one"
            )

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, key: int) -> bytes:
        """The payload under a key. KeyError: the index has no such key. BadRecord: the record is damaged."""
        return self._read_at(key, self._offset_of(key))

    def will_need(self, key: int) -> None:
        """Asks the kernel to fetch a record and returns at once, so that a disk has many reads to sort."""
        start = self._offset_of(key) // mmap.PAGESIZE * mmap.PAGESIZE
        # The length is not known before the record is read. Twice the mean holds nearly all of them.
        self._map.madvise(mmap.MADV_WILLNEED, start, min(2 * self._mean_bytes + mmap.PAGESIZE, self._size - start))

    def first_labels(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """The first label of each record, float32 (len(keys),), from the headers and without a Python loop.

        Raises BadRecord for the first record whose frame or header is not whole, as far as the first label.
        """
        offset = self._offsets[self._rows_of(keys)]
        word = np.frombuffer(self._map, "<u4", self._size // 4)
        first = offset // 4
        whole = first + (_FRAME.size + _HEADER.size) // 4 <= len(word)
        whole[whole] = word[first[whole]] == MAGIC
        if not whole.all():
            self._first_label(int(keys[int(whole.argmin())]))  # names what is wrong
        flag = word[first + 2]
        at = np.where(flag == 0, first + 3, first + 8)
        label = word[np.minimum(at, len(word) - 1)].view("<f4")
        length = word[first + 1] & MAX_RECORD_BYTES
        # Short ones are damaged, or split within their header, where a number happens to be the magic one.
        for row in np.flatnonzero(length < np.where(flag == 0, _HEADER.size, _HEADER.size + 4)).tolist():
            label[row] = self._first_label(int(keys[row]))
        return label

    def _first_label(self, key: int) -> float:
        try:
            return float(unpack(self.read(key))[0].label[0])
        except BadRecord as error:
            if str(self.rec_path) in str(error):
                raise
            raise BadRecord(f"{self.rec_path}, key {key}: {error}") from None

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _offset_of(self, key: int) -> int:
        if isinstance(self.keys, range):
            row = key if 0 <= key < len(self.keys) else -1
        else:
            row = int(np.searchsorted(self.keys, key))
            row = row if row < len(self.keys) and self.keys[row] == key else -1
        if row < 0:
            raise KeyError(f"{self.idx_path}: no record has key {key}; keys are {self.keys[0]} to {self.keys[-1]}")
        return int(self._offsets[row])

    def _rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        return keys if isinstance(self.keys, range) else np.searchsorted(self.keys, keys)

    def _read_at(self, key: int, start: int) -> bytes:
        part, offset, content = self._frame(key, start)
        if part == _WHOLE:
            return content
        if part != _FIRST:
            raise BadRecord(f"{self._where(key, start)}: got part {part} of a split record, expected its first part")
        parts = [content]
        while part != _LAST:
            begin = offset
            part, offset, content = self._frame(key, begin)
            if part not in (_MIDDLE, _LAST):
                raise BadRecord(
                    f"{self._where(key, begin)}: got part {part}, "
                    f"expected part 2 or 3 of the split record that starts at {start}"
                )
            parts.append(content)
        return _MAGIC_BYTES.join(parts)

    def _frame(self, key: int, offset: int) -> tuple[int, int, bytes]:
        """(part, offset of the next frame, content) of the frame at an offset."""
        begin = offset + _FRAME.size
        if begin > self._size:
            raise BadRecord(f"{self._where(key, offset)}: the file ends at {self._size}, inside a frame header")
        magic, word = _FRAME.unpack_from(self._map, offset)
        if magic != MAGIC:
            raise BadRecord(
                f"{self._where(key, offset)}: got {magic:#010x}, expected the magic number {MAGIC:#010x}; "
                f"the record is damaged, or {self.idx_path.name} belongs to another file"
            )
        end = begin + (word & MAX_RECORD_BYTES)
        if end > self._size:
            raise BadRecord(
                f"{self._where(key, offset)}: record of {end - begin} bytes ends at {end}, "
                f"expected at most {self._size}, the size of the file: it is cut short"
            )
        return word >> 29, end + -end % 4, self._map[begin:end]

    def _where(self, key: int, offset: int) -> str:
        return f"{self.rec_path}, key {key}, offset {offset}"


def write_index(rec_path: str | os.PathLike[str]) -> int:
    """Makes the .idx of a .rec that has none; returns the number of records.

    The keys are the ids of the label headers, where im2rec and InsightFace store them; if those are not all
    different or not below 2^63, the keys are 0, 1, 2, ... in file order. BadRecord: where a frame is damaged.
    """
    rec_path = Path(rec_path)
    offsets: list[int] = []
    ids: list[int] = []
    with open(rec_path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ValueError(f"{rec_path} is empty")
        offset, part = 0, _WHOLE
        while offset < size or part in (_FIRST, _MIDDLE):
            file.seek(offset)
            start = file.read(_FRAME.size + _HEADER.size)
            magic, word = _FRAME.unpack_from(start) if len(start) >= _FRAME.size else (0, 0)
            inside = part in (_FIRST, _MIDDLE)
            part, length = word >> 29, word & MAX_RECORD_BYTES
            end = offset + _FRAME.size + length
            fits = part in ((_MIDDLE, _LAST) if inside else (_WHOLE, _FIRST))
            if magic != MAGIC or end > size or not fits:
                raise BadRecord(f"{rec_path}, offset {offset}, after {len(offsets)} records: no whole frame here")
            if part in (_WHOLE, _FIRST):
                offsets.append(offset)
                if length >= _HEADER.size:
                    ids.append(_HEADER.unpack_from(start, _FRAME.size)[2])
            offset = end + -end % 4
    keys = ids if len(set(ids)) == len(offsets) and max(ids) < 2**63 else range(len(offsets))
    idx_path = rec_path.with_suffix(".idx")
    with replacing(idx_path) as partial, partial.open("w", newline="\n") as out:
        out.writelines(f"{key}\t{offset}\n" for key, offset in zip(keys, offsets, strict=True))
    return len(offsets)


def _aligned_magics(record: bytes) -> list[int]:
    """Multiples of 4 at which the magic number stands; bytes.find makes the usual case, none, cheap."""
    found = []
    at = record.find(_MAGIC_BYTES)
    while at >= 0:
        if at % 4 == 0:
            found.append(at)
        at = record.find(_MAGIC_BYTES, at + 1)
    return found
