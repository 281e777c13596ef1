"""The text index of a .rec file into arrays, quickly."""

import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_CHUNK_BYTES = 2**26


def read_index(path: str | os.PathLike[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(keys, offsets) of a .idx file, int64, sorted by key. 17 million lines: 4 s, 0.7 GB at the peak."""
    path = Path(path)
    pieces = [_parse_index(path, text) for text in _read_lines(path)]
    table = np.concatenate(pieces) if pieces else np.empty((0, 2), np.int64)
    del pieces
    if len(table) == 0:
        raise ValueError(f"{path} has no lines; expected `key<TAB>offset` for each record")
    keys, offsets = table[:, 0].copy(), table[:, 1].copy()
    step = np.diff(keys)
    if (step <= 0).any():
        order = np.argsort(keys, kind="stable")
        keys, offsets = keys[order], offsets[order]
        step = np.diff(keys)
    if (step == 0).any():
        raise ValueError(f"{path}: key {keys[int((step == 0).argmax())]} occurs more than once")
    return keys, offsets


def _read_lines(path: Path) -> Iterator[bytes]:
    """The file in pieces of whole lines, so that never the whole text lies in memory beside the numbers."""
    with open(path, "rb") as file:
        while text := file.read(_CHUNK_BYTES):
            yield text + file.readline()


def _parse_index(path: Path, text: bytes) -> NDArray[np.int64]:
    """int64 (lines, 2): key, offset."""
    lines = text.count(b"\n") + (not text.endswith(b"\n"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # how numpy 1 says that a word is no number
            table = np.fromstring(text, np.int64, sep=" ")
    except (ValueError, DeprecationWarning):
        table = np.empty(0, np.int64)
    if len(table) != 2 * lines:
        pattern = re.compile(rb"\s*-?\d+\s+-?\d+\s*")
        bad = next((line for line in text.splitlines() if not pattern.fullmatch(line)), text[:80])
        raise ValueError(f"{path}: expected `key<TAB>offset` on each line, got {bad[:80]!r}")
    return table.reshape(-1, 2)
