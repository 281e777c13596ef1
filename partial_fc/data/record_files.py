"""The two files of a RecordIO set: the frames of NAME.rec and the index NAME.idx, independent of the records' contents.

NAME.rec is a sequence of frames, each starting at a multiple of 4 bytes, little-endian:
    uint32 0xCED7230A | uint32 part << 29 | length | payload | zeros up to a multiple of 4
part is 0 for a whole record. A payload with the magic number at a multiple of 4 would confuse a scanner, so the writer
splits it there and omits those 4 bytes: parts 1, 2, ..., 2, 3, which the reader joins with the magic number between
them. Source of the format: dmlc-core `recordio.h`, `recordio.cc`.

NAME.idx is text, one line a record: `key<TAB>offset of its first frame`.

R records.
"""

import mmap
import os
import re
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.sample import BadRecord
from partial_fc.file_kind import HEAD_BYTES, it_is
from partial_fc.files import regular

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
FRAME = struct.Struct("<II")
MAX_RECORD_BYTES = 2**29 - 1
WHOLE, FIRST, MIDDLE, LAST = range(4)
_CHUNK_BYTES = 2**26

Keys = NDArray[np.int64] | range


class RecordFile:
    """A memory-mapped .rec file, shared by the processes of a machine. Raises ValueError if it is too short for a
    frame."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb", opener=regular) as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < FRAME.size:
                raise ValueError(f"{path} has {self.size} bytes; expected records")
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def parts(self, offset: int) -> list[tuple[int, int]]:
        """Returns (begin, end) of the payloads of the record at an offset. Raises BadRecord."""
        part, begin, end = self._frame(offset)
        parts = [(begin, end)]
        if part == WHOLE:
            return parts
        if part != FIRST:
            raise BadRecord(f"offset {offset}: got part {part} of a split record, expected its first part")
        while part != LAST:
            at = aligned(end)
            part, begin, end = self._frame(at)
            if part not in (MIDDLE, LAST):
                raise BadRecord(
                    f"offset {at}: got part {part}, expected part 2 or 3 of the split record that starts at {offset}"
                )
            parts.append((begin, end))
        return parts

    def read(self, offset: int) -> bytes:
        """Reads the record at an offset. Raises BadRecord."""
        return MAGIC_BYTES.join([self.map[begin:end] for begin, end in self.parts(offset)])

    def _frame(self, offset: int) -> tuple[int, int, int]:
        """Returns (part, begin, end of its payload) of the frame at an offset."""
        begin = offset + FRAME.size
        if begin > self.size:
            raise BadRecord(f"offset {offset}: the file ends at {self.size}, inside a frame header")
        magic, word = FRAME.unpack_from(self.map, offset)
        if magic != MAGIC:
            raise BadRecord(
                f"offset {offset}: got {magic:#010x}, expected the magic number {MAGIC:#010x}"
                f"{it_is(self.map[:HEAD_BYTES]) or '; the record is damaged, or the index belongs to another file'}"
            )
        end = begin + (word & MAX_RECORD_BYTES)
        if end > self.size:
            raise BadRecord(
                f"offset {offset}: record of {end - begin} bytes ends at {end}, expected at most {self.size}, the size "
                "of the file: it is cut short"
            )
        return word >> 29, begin, end


def aligned(offset: int) -> int:
    """Returns the start of the frame that follows an end at `offset`."""
    return offset + -offset % 4


# ---- the index


def read_index(path: str | os.PathLike[str]) -> tuple[Keys, NDArray[np.int64]]:
    """Parses a .idx file, a million records in a quarter of a second: (keys, offsets), sorted by key; keys 0, 1, 2, ...
    as a range. Takes 16 bytes a record and a chunk of text."""
    path = Path(path)
    num_records = sum(_lines(text) for text in _read_lines(path))
    if num_records == 0:
        raise ValueError(f"{path} has no lines; expected `key<TAB>offset` for each record")
    key_R, offset_R = np.empty(num_records, np.int64), np.empty(num_records, np.int64)
    begin = 0
    for text in _read_lines(path):
        table = _parse_chunk(path, text)
        key_R[begin : begin + len(table)], offset_R[begin : begin + len(table)] = table.T
        begin += len(table)
    step = np.diff(key_R)
    if (step <= 0).any():
        order = np.argsort(key_R, kind="stable")
        key_R, offset_R = key_R[order], offset_R[order]
        step = np.diff(key_R)
    if (step == 0).any():
        raise ValueError(f"{path}: key {key_R[int((step == 0).argmax())]} occurs more than once")
    dense = key_R[0] == 0 and key_R[-1] == num_records - 1  # sorted and unique: 0, 1, 2, ...
    return range(num_records) if dense else key_R, offset_R


def _read_lines(path: Path) -> Iterator[bytes]:
    """Yields the file in chunks of whole lines, so that the whole text is never in memory."""
    with open(path, "rb", opener=regular) as file:
        while text := file.read(_CHUNK_BYTES):
            yield text + file.readline()


def _lines(text: bytes) -> int:
    return text.count(b"\n") + (not text.endswith(b"\n"))


def _parse_chunk(path: Path, text: bytes) -> NDArray[np.int64]:
    """Parses lines to int64 (lines, 2): key, offset."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # numpy 1's report of a word that is no number
            table = np.fromstring(text, np.int64, sep=" ")
    except (ValueError, DeprecationWarning):
        table = np.empty(0, np.int64)
    if len(table) != 2 * _lines(text):
        pattern = re.compile(rb"\s*-?\d+\s+-?\d+\s*")
        bad = next((line for line in text.splitlines() if not pattern.fullmatch(line)), text[:80])
        raise ValueError(f"{path}: expected `key<TAB>offset` on each line, got {bad[:80]!r}{it_is(path)}")
    return table.reshape(-1, 2)
