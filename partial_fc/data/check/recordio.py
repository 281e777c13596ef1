"""A .rec file as it is, whatever is wrong with it: what the reader that trains would refuse is listed here.

Everything about frames and headers is computed on arrays: 17 million records take some seconds and 3 GB of memory.

R records that the index names and that are whole, in order of their keys; N of them have an image.
"""

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.record_index import read_index
from partial_fc.data.record_source import are_whole
from partial_fc.data.recordio import MAGIC, MAX_RECORD_BYTES
from partial_fc.findings import Finding, Severity

_FRAME, _HEADER = 8, 24  # bytes
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
NO_LABEL = -(2**62)
_FAR = 2.0**61


class CannotLook(ValueError):
    """There is nothing of this set that the doctor could examine."""


class Records:
    """Reads images like data.RecordSource, but of every record that can be read at all.

    findings: what is wrong with index and frames. Raises CannotLook where the file is missing or empty, or no index
    can be read.
    """

    def __init__(self, rec_path: Path) -> None:
        self.path = rec_path
        self.findings: list[Finding] = []
        self._map, self._size = _mapped(rec_path)
        self._word = np.frombuffer(self._map, "<u4", self._size // 4)
        idx_path = rec_path.with_suffix(".idx")
        try:
            keys, offsets = read_index(idx_path)
        except FileNotFoundError:
            raise CannotLook(f"{idx_path} not found; make it anew: partial-fc data index {rec_path}") from None
        except (ValueError, OSError) as error:
            raise CannotLook(f"{error}; make the index anew: partial-fc data index {rec_path}") from None
        self._all_keys, self._all_offsets = keys, offsets
        whole = self._check_frames()
        self.key_R, self.offset_R = keys[whole], offsets[whole]
        self._read_headers()
        self.image_N = np.flatnonzero(self.content_bytes_R > 0)
        self.key_N = self.key_R[self.image_N]
        if not len(self.image_N):
            raise CannotLook(f"{rec_path}: of {len(keys)} records that {idx_path} names none has an image")

    def __len__(self) -> int:
        return len(self.image_N)

    @property
    def label_N(self) -> NDArray[np.int64]:
        """Of the images; NO_LABEL where it is no whole number."""
        raw = self.raw_label_R[self.image_N]
        label = np.where(are_whole(raw), raw, 0).astype(np.float64)
        # int64 has no place for all that float32 can be.
        return np.where(are_whole(raw), np.clip(label, -_FAR, _FAR), NO_LABEL).astype(np.int64)

    def describe(self, i: int) -> Mapping[str, Any]:
        """Image i."""
        label = float(self.raw_label_R[self.image_N[i]])
        return {"key": int(self.key_N[i]), "class": int(label) if label.is_integer() else str(label)}

    def read(self, i: int) -> bytes:
        """The file of image i, without the label header."""
        row = self.image_N[i]
        start, header = int(self.offset_R[row]), int(self.header_bytes_R[row])
        word = int(self._word[start // 4 + 1])
        if word >> 29 == _WHOLE:
            return self._map[start + _FRAME + header : start + _FRAME + (word & MAX_RECORD_BYTES)]
        joined = MAGIC.to_bytes(4, "little").join(self._map[a:b] for a, b in self._parts(start))
        return joined[header:]

    def in_file_order(self) -> NDArray[np.int64]:
        """Places of the images, as they follow one another in the file."""
        return np.argsort(self.offset_R[self.image_N], kind="stable")

    def close(self) -> None:
        del self._word
        self._map.close()

    # ---- frames

    def _check_frames(self) -> NDArray[np.bool_]:
        """Which records of the index are whole; sets end_R of them through findings' bookkeeping."""
        offset = self._all_offsets
        inside = (offset >= 0) & (offset % 4 == 0) & (offset + _FRAME <= self._size)
        self._say(
            "error", "index-offset",
            f"offsets of the index are no multiple of 4 below the file's {self._size:,} bytes: the file is cut short, "
            "or the index belongs to another one", ~inside,
        )  # fmt: skip
        word_at = np.where(inside, offset // 4, 0)
        is_frame = inside.copy()
        is_frame[inside] = self._word[word_at[inside]] == MAGIC
        self._say(
            "error",
            "index-frame",
            "offsets of the index point to no record: damaged, or of another file",
            inside & ~is_frame,
        )
        head = np.zeros(len(offset), np.uint32)
        head[is_frame] = self._word[word_at[is_frame] + 1]
        part = head >> 29
        self._say(
            "error",
            "index-part",
            "offsets of the index point into the middle of a split record",
            is_frame & (part > _FIRST),
        )
        end = offset + _FRAME + (head & MAX_RECORD_BYTES).astype(np.int64)
        starts = is_frame & (part <= _FIRST)
        length = np.where(starts, end - offset - _FRAME, 0)
        for row in np.flatnonzero(starts & (part == _FIRST)):
            parts = list(self._parts(int(offset[row])))
            end[row] = parts[-1][1] if parts else self._size + 1
            length[row] = sum(b - a for a, b in parts) + 4 * (len(parts) - 1)
        fits = starts & (end <= self._size)
        self._say("error", "record-cut", "records run past the end of the file: it is cut short", starts & ~fits)
        end += -end % 4
        ordered = np.flatnonzero(fits)[np.argsort(offset[fits], kind="stable")]
        following = np.append(offset[ordered[1:]], self._size)
        overlaps = np.zeros(len(offset), np.bool_)
        overlaps[ordered] = end[ordered] > following
        if len(ordered):
            overlaps[ordered[-1]] = False  # padding that was left away at the end of the file
        self._say(
            "error",
            "record-overlap",
            "records run into the next: their length is damaged, or two keys have one offset",
            overlaps,
        )
        whole = fits & ~overlaps
        self._check_gaps(offset[ordered], np.minimum(end[ordered], self._size))
        self._record_bytes = length[whole]
        return whole

    def _parts(self, start: int) -> Iterator[tuple[int, int]]:
        """(start, end) of the contents of a split record's frames; nothing where one is missing."""
        found: list[tuple[int, int]] = []
        while start + _FRAME <= self._size and self._word[start // 4] == MAGIC:
            word = int(self._word[start // 4 + 1])
            part, end = word >> 29, start + _FRAME + (word & MAX_RECORD_BYTES)
            if end > self._size or (part != _FIRST if not found else part not in (_MIDDLE, _LAST)):
                return
            found.append((start + _FRAME, end))
            if part == _LAST:
                yield from found
                return
            start = end + -end % 4

    def _check_gaps(self, start_R: NDArray[np.int64], end_R: NDArray[np.int64]) -> None:
        """What lies between the records that the index names; in file order."""
        before = np.concatenate(([0], np.maximum.accumulate(end_R)))
        after = np.append(start_R, self._size)
        nameless, waste = [], []
        for gap in np.flatnonzero(after > before):
            at, stop = int(before[gap]), int(after[gap])
            while at + _FRAME <= stop and self._word[at // 4] == MAGIC:
                word = int(self._word[at // 4 + 1])
                end = at + _FRAME + (word & MAX_RECORD_BYTES)
                if end > stop:
                    break
                if word >> 29 in (_WHOLE, _FIRST):
                    nameless.append(at)
                at = end + -end % 4
            if at < stop:
                waste.append(at)
        for key, what, offsets in (
            ("index-nameless", "whole records of the file are not in the index: training never sees them", nameless),
            ("file-waste", "places of the file hold no records", waste),
        ):  # fmt: skip
            if offsets:
                self.findings.append(
                    Finding(
                        "warning",
                        key,
                        what,
                        len(offsets),
                        offsets,
                        lambda offset: {"offset": offset},
                        str(self.path),
                    )
                )

    def _say(self, severity: Severity, key: str, what: str, which: NDArray[np.bool_]) -> None:
        """About records of the index, by their row in it."""
        rows = np.flatnonzero(which)
        if len(rows):
            keys, offsets = self._all_keys, self._all_offsets

            def describe(row: int) -> Mapping[str, Any]:
                return {"key": int(keys[row]), "offset": int(offsets[row])}

            self.findings.append(Finding(severity, key, what, len(rows), rows, describe, str(self.path)))

    # ---- label headers

    def _read_headers(self) -> None:
        word, first = self._word, self.offset_R // 4
        short = self._record_bytes < _HEADER
        at = np.where(short, 0, first)
        flag = np.where(short, 0, word[at + 2]).astype(np.int64)
        cut = short | (self._record_bytes < _HEADER + 4 * flag)
        if cut.any():
            rows = np.flatnonzero(cut)
            keys, num_bytes = self.key_R, self._record_bytes
            what = "records are shorter than their label header"
            self.findings.append(
                Finding(
                    "error", "record-header", what, len(rows), rows,
                    lambda row: {"key": int(keys[row]), "bytes": int(num_bytes[row])}, str(self.path),
                )
            )  # fmt: skip
        flag[cut] = 0
        self.cut_R = cut
        self.flag_R = flag
        self.header_bytes_R = _HEADER + 4 * flag
        self.content_bytes_R = np.where(cut, 0, self._record_bytes - self.header_bytes_R)
        last = len(word) - 1
        self.raw_label_R = word[np.minimum(np.where(flag == 0, first + 3, first + 8), last)].view("<f4")
        self.raw_second_R = word[np.minimum(np.where(flag < 2, first + 3, first + 9), last)].view("<f4")
        self.id_R = word[np.minimum(first + 4, last)].astype(np.uint64) | (
            word[np.minimum(first + 5, last)].astype(np.uint64) << np.uint64(32)
        )


def _mapped(path: Path) -> tuple[mmap.mmap, int]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _FRAME + _HEADER:
                raise CannotLook(f"{path} has {size} bytes; expected records")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), size
    except OSError as error:
        raise CannotLook(f"{path}: {error.strerror}; expected a .rec file") from None
