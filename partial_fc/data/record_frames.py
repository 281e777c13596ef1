"""The frames of a .rec file: where they are, and which of them make a record. Nothing here knows what a record holds.

A file is a sequence of frames, each starting at a multiple of 4 bytes, little-endian:
    uint32 0xCED7230A | uint32 part << 29 | length | payload | zeros up to a multiple of 4
part is 0 for a whole record. A payload that holds the magic number at a multiple of 4 would confuse a scanner, so the
writer splits it there and leaves those 4 bytes out: parts 1, 2, ..., 2, 3, which the reader joins with the magic number
between them. Source of the format: dmlc-core `recordio.h`, `recordio.cc`.

F frames, R records.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.sample import BadRecord
from partial_fc.files import regular

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
FRAME = struct.Struct("<II")
MAX_RECORD_BYTES = 2**29 - 1
WHOLE, FIRST, MIDDLE, LAST = range(4)


class FrameHeads(NamedTuple):
    """is_frame: does a frame begin there? Else its part and length are 0. length: bytes of its payload."""

    is_frame: NDArray[np.bool_]
    part: NDArray[np.uint8]
    length: NDArray[np.int64]


class RecordFile:
    """A mapped .rec file: opening it costs nothing, and processes of one machine share the pages. words: all of it as
    numbers of 32 bits. Raises ValueError where it is too short for a frame."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb", opener=regular) as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < FRAME.size:
                raise ValueError(f"{path} has {self.size} bytes; expected records")
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @property
    def words(self) -> NDArray[np.uint32]:
        # Not kept: a map cannot be closed while an array shows it.
        return np.frombuffer(self.map, "<u4", self.size // 4)

    def close(self) -> None:
        self.map.close()

    def have_room(self, offset_F: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which offsets are those of a possible frame: multiples of 4 with room for its head behind them."""
        return (offset_F >= 0) & (offset_F % 4 == 0) & (offset_F <= self.size - FRAME.size)

    def heads(self, offset_F: NDArray[np.int64]) -> FrameHeads:
        """What stands at offsets, which may be any numbers."""
        words, inside = self.words, self.have_room(offset_F)
        at = np.where(inside, offset_F // 4, 0)
        is_frame = inside & (words[at] == MAGIC)
        head = np.where(is_frame, words[np.where(is_frame, at + 1, 0)], np.uint32(0))
        return FrameHeads(is_frame, (head >> 29).astype(np.uint8), (head & MAX_RECORD_BYTES).astype(np.int64))

    def walk(self, begin: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(part, begin, end) of the frames that follow one another from `begin` on, as long as they are whole and end
        before `stop`. 17 million take 20 s."""
        at = begin
        while at + FRAME.size <= stop:
            magic, word = FRAME.unpack_from(self.map, at)
            end = at + FRAME.size + (word & MAX_RECORD_BYTES)
            if magic != MAGIC or end > stop:
                return
            yield word >> 29, at, end
            at = aligned(end)

    def parts(self, offset: int) -> list[tuple[int, int]]:
        """(begin, end) of the payloads that make the record which starts at an offset. Raises BadRecord."""
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
        """The record that starts at an offset. Raises BadRecord."""
        part, begin, end = self._frame(offset)
        if part == WHOLE:
            return self.map[begin:end]
        return MAGIC_BYTES.join([self.map[begin:end] for begin, end in self.parts(offset)])

    def _frame(self, offset: int) -> tuple[int, int, int]:
        """(part, begin, end of its payload) of the frame at an offset."""
        begin = offset + FRAME.size
        if begin > self.size:
            raise BadRecord(f"offset {offset}: the file ends at {self.size}, inside a frame header")
        magic, word = FRAME.unpack_from(self.map, offset)
        if magic != MAGIC:
            raise BadRecord(
                f"offset {offset}: got {magic:#010x}, expected the magic number {MAGIC:#010x}; the record is damaged, "
                "or the index belongs to another file"
            )
        end = begin + (word & MAX_RECORD_BYTES)
        if end > self.size:
            raise BadRecord(
                f"offset {offset}: record of {end - begin} bytes ends at {end}, expected at most {self.size}, the size "
                "of the file: it is cut short"
            )
        return word >> 29, begin, end


def aligned(offset: int) -> int:
    """Where the frame behind one that ends at `offset` starts."""
    return offset + -offset % 4
