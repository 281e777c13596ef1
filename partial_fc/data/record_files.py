"""The two files of a RecordIO set: the frames of NAME.rec and the index NAME.idx, independent of the records' contents.

NAME.rec is a sequence of frames, each starting at a multiple of 4 bytes, little-endian:
    uint32 0xCED7230A | uint32 part << 29 | length | payload | zeros up to a multiple of 4
part is 0 for a whole record. A payload with the magic number at a multiple of 4 would confuse a scanner, so the writer
splits it there and omits those 4 bytes: parts 1, 2, ..., 2, 3, which the reader joins with the magic number between
them. Source of the format: dmlc-core `recordio.h`, `recordio.cc`.

NAME.idx is text, one line a record: `key<TAB>offset of its first frame`. A large one gets a binary copy for fast
opening, NAME.idx.cache, rewritten when the size or time of NAME.idx changes: a .npy file of int64 (2, 1 + R), size and
time in ns, then keys and offsets.

F frames, R records.
"""

import logging
import mmap
import os
import platform
import re
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.npy import read_npy
from partial_fc.data.sample import BadRecord
from partial_fc.files import regular

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
FRAME = struct.Struct("<II")
MAX_RECORD_BYTES = 2**29 - 1
WHOLE, FIRST, MIDDLE, LAST = range(4)
_CHUNK_BYTES = 2**26
_CACHED_FROM_BYTES = 2**24  # a million records, which take a quarter of a second to parse

_log = logging.getLogger(__name__)


class FrameHeads(NamedTuple):
    """Frame heads at offsets. is_frame: a frame begins there, else part and length are 0. length: payload bytes."""

    is_frame: NDArray[np.bool_]
    part: NDArray[np.uint8]
    length: NDArray[np.int64]


class RecordFile:
    """A memory-mapped .rec file, shared by the processes of a machine. words: the file as uint32. Raises ValueError if
    it is too short for a frame."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb", opener=regular) as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < FRAME.size:
                raise ValueError(f"{path} has {self.size} bytes; expected records")
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @property
    def words(self) -> NDArray[np.uint32]:
        # Not stored: a map cannot be closed while an array refers to it.
        return np.frombuffer(self.map, "<u4", self.size // 4)

    def close(self) -> None:
        self.map.close()

    def have_room(self, offset_F: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tells which offsets can start a frame: multiples of 4 with room for a head."""
        return (offset_F >= 0) & (offset_F % 4 == 0) & (offset_F <= self.size - FRAME.size)

    def heads(self, offset_F: NDArray[np.int64]) -> FrameHeads:
        """Returns the frame heads at offsets, which may be any numbers."""
        words, inside = self.words, self.have_room(offset_F)
        at = np.where(inside, offset_F // 4, 0)
        is_frame = inside & (words[at] == MAGIC)
        head = np.where(is_frame, words[np.where(is_frame, at + 1, 0)], np.uint32(0))
        return FrameHeads(is_frame, (head >> 29).astype(np.uint8), (head & MAX_RECORD_BYTES).astype(np.int64))

    def walk(self, begin: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields (part, begin, end) of consecutive whole frames from `begin` that end before `stop`: 17 million in 20
        s."""
        at = begin
        while at + FRAME.size <= stop:
            magic, word = FRAME.unpack_from(self.map, at)
            end = at + FRAME.size + (word & MAX_RECORD_BYTES)
            if magic != MAGIC or end > stop:
                return
            yield word >> 29, at, end
            at = aligned(end)

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
        part, begin, end = self._frame(offset)
        if part == WHOLE:
            return self.map[begin:end]
        return MAGIC_BYTES.join([self.map[begin:end] for begin, end in self.parts(offset)])

    def _frame(self, offset: int) -> tuple[int, int, int]:
        """Returns (part, begin, end of its payload) of the frame at an offset."""
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
    """Returns the start of the frame that follows an end at `offset`."""
    return offset + -offset % 4


# ---- the index


def read_index(path: str | os.PathLike[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Reads a .idx file: (keys, offsets), sorted by key; mapped from the binary copy if there is one."""
    path = Path(path)
    stat = os.stat(path)
    stamp = (stat.st_size, stat.st_mtime_ns)
    cache = path.with_name(f"{path.name}.cache")
    large = stat.st_size >= _CACHED_FROM_BYTES
    table = _read_cache(cache, stamp, _rec_bytes(path)) if large else None
    if table is None:
        table = _parse(path, stamp)
        if large:
            try:
                _write_cache(cache, table)
            except OSError as error:
                _log.info("%s is parsed at every start: no room for its binary copy (%s)", path, error)
    key_R, offset_R = table[:, 1:]
    return key_R, offset_R


def _parse(path: Path, stamp: tuple[int, int]) -> NDArray[np.int64]:
    """Returns (2, 1 + R): the stamp, then key and offset of each record."""
    num_records = sum(_lines(text) for text in _read_lines(path))
    if num_records == 0:
        raise ValueError(f"{path} has no lines; expected `key<TAB>offset` for each record")
    table = np.empty((2, 1 + num_records), np.int64)
    table[:, 0] = stamp
    begin = 1
    for text in _read_lines(path):
        chunk = _parse_chunk(path, text)
        table[:, begin : begin + len(chunk)] = chunk.T
        begin += len(chunk)
    key_R = table[0, 1:]
    if (np.diff(key_R) <= 0).any():
        table[:, 1:] = table[:, 1:][:, np.argsort(key_R, kind="stable")]
    if (twice := np.diff(key_R) == 0).any():
        raise ValueError(f"{path}: key {key_R[int(twice.argmax())]} occurs more than once")
    return table


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
        raise ValueError(f"{path}: expected `key<TAB>offset` on each line, got {bad[:80]!r}")
    return table.reshape(-1, 2)


def _rec_bytes(path: Path) -> int:
    """Returns the size of the .rec file beside an index."""
    try:
        return os.stat(path.with_suffix(".rec")).st_size
    except OSError:  # opening it reports the error
        return 1 << 62


def _read_cache(cache: Path, stamp: tuple[int, int], rec_bytes: int) -> NDArray[np.int64] | None:
    """Maps the binary copy; None if there is no valid one of this index: the folder may not be ours."""
    try:
        table = read_npy(cache)
    except (OSError, ValueError):
        return None
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[0] != 2 or table.shape[1] < 2:
        return None
    key_R, offset_R = table[:, 1:]
    is_right = tuple(table[:, 0]) == stamp and offset_R.min() >= 0 and offset_R.max() < rec_bytes
    return table if is_right and (key_R[1:] > key_R[:-1]).all() else None


def _write_cache(cache: Path, table: NDArray[np.int64]) -> None:
    # A name per process: all ranks may write one at once.
    own = cache.with_name(f"{cache.name}.{platform.node()}.{os.getpid()}")
    try:
        with own.open("wb") as file:
            np.save(file, table)
        own.replace(cache)
    finally:
        own.unlink(missing_ok=True)
