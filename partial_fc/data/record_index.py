"""The text index of a .rec file into arrays, and the binary copy of a large one, which opens at once.

The copy, NAME.idx.cache, lies beside the index and is made anew when the index' size or time is another one:
    8 bytes "PFCIDX01" | five u64: size of NAME.idx, its time in ns, R, CRC-32 of what follows, bytes of it
    int64 offset (R,) | int64 key (R,), left out where the keys are 0, 1, ..., R - 1

R records.
"""

import logging
import os
import platform
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partial_fc.files import check_regular, regular

_CHUNK_BYTES = 2**26
_CACHED_FROM_BYTES = 2**24  # a million records, which take a quarter of a second to parse
_HEAD = struct.Struct("<8s5Q")
_MAGIC = b"PFCIDX01"

_log = logging.getLogger(__name__)
Keys = NDArray[np.int64] | range


def read_index(path: str | os.PathLike[str]) -> tuple[Keys, NDArray[np.int64]]:
    """(keys, offsets) of a .idx file, sorted by key; the keys are a range where they are 0, 1, 2, ...

    8 bytes a record then, else 16, mapped from the copy where there is one. Parsing takes 16 and the text of a chunk.
    """
    path = Path(path)
    stat = os.stat(path)
    stamp = (stat.st_size, stat.st_mtime_ns)
    cache = path.with_name(f"{path.name}.cache")
    if stat.st_size >= _CACHED_FROM_BYTES and (cached := _read_cache(cache, stamp, _rec_bytes(path))):
        return cached
    keys, offset_R = _parse(path)
    if stat.st_size >= _CACHED_FROM_BYTES:
        try:
            _write_cache(cache, stamp, keys, offset_R)
        except OSError as error:
            _log.info("%s is parsed at every start: no room for its binary copy (%s)", path, error)
    return keys, offset_R


def _parse(path: Path) -> tuple[Keys, NDArray[np.int64]]:
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
    """The file in pieces of whole lines, so that never the whole text lies in memory beside the numbers."""
    with open(path, "rb", opener=regular) as file:
        while text := file.read(_CHUNK_BYTES):
            yield text + file.readline()


def _lines(text: bytes) -> int:
    return text.count(b"\n") + (not text.endswith(b"\n"))


def _parse_chunk(path: Path, text: bytes) -> NDArray[np.int64]:
    """int64 (lines, 2): key, offset."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # how numpy 1 says that a word is no number
            table = np.fromstring(text, np.int64, sep=" ")
    except (ValueError, DeprecationWarning):
        table = np.empty(0, np.int64)
    if len(table) != 2 * _lines(text):
        pattern = re.compile(rb"\s*-?\d+\s+-?\d+\s*")
        bad = next((line for line in text.splitlines() if not pattern.fullmatch(line)), text[:80])
        raise ValueError(f"{path}: expected `key<TAB>offset` on each line, got {bad[:80]!r}")
    return table.reshape(-1, 2)


def _rec_bytes(path: Path) -> int:
    """The size of the records' file beside an index."""
    try:
        return os.stat(path.with_suffix(".rec")).st_size
    except OSError:  # who opens it says what is wrong
        return 1 << 62


def _read_cache(cache: Path, stamp: tuple[int, int], rec_bytes: int) -> tuple[Keys, NDArray[np.int64]] | None:
    """None: there is none of this index, or what is there is no copy of one: the folder may be of others."""
    try:
        check_regular(cache)
        content = np.memmap(cache, np.uint8, "r")
    except (OSError, ValueError):  # not there; empty
        return None
    if len(content) < _HEAD.size:
        return None
    magic, *made_of, num_records, crc, num_bytes = _HEAD.unpack(content[: _HEAD.size].tobytes())
    body = content[_HEAD.size :]
    if magic != _MAGIC or tuple(made_of) != stamp or len(body) != num_bytes or zlib.crc32(body.data) != crc:
        return None
    if not num_records or num_bytes not in (8 * num_records, 16 * num_records):
        return None
    offset_R, *keys = body.view("<i8").reshape(-1, num_records)
    if offset_R.min() < 0 or offset_R.max() >= rec_bytes or any((key_R[1:] <= key_R[:-1]).any() for key_R in keys):
        return None
    return (keys[0] if keys else range(num_records)), offset_R


def _write_cache(cache: Path, stamp: tuple[int, int], keys: Keys, offset_R: NDArray[np.int64]) -> None:
    columns = [offset_R] if isinstance(keys, range) else [offset_R, keys]
    crc = 0
    for column in columns:
        crc = zlib.crc32(column.astype("<i8", copy=False).data, crc)
    # The name is this process' own: all ranks may come here at once.
    own = cache.with_name(f"{cache.name}.{platform.node()}.{os.getpid()}")
    try:
        with own.open("wb") as file:
            file.write(_HEAD.pack(_MAGIC, *stamp, len(offset_R), crc, 8 * len(columns) * len(offset_R)))
            for column in columns:
                column.astype("<i8", copy=False).tofile(file)
        own.replace(cache)
    finally:
        own.unlink(missing_ok=True)
