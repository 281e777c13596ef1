"""Check of a .rec file that lists everything that the training reader would refuse.

Frames and headers are checked on arrays: 17 million records take some seconds and 3 GB of memory.

R whole records that the index names, in key order; N of them have an image.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.record_files import FIRST, FRAME, WHOLE, RecordFile, aligned, read_index
from partial_fc.data.recordio import HEADER, are_whole, first_labels
from partial_fc.data.sample import BadRecord
from partial_fc.findings import Describe, Finding, Severity, findings_at

NO_LABEL = -(2**62)
_FAR = 2.0**61


class CannotCheck(ValueError):
    """Nothing of this set can be checked."""


class Records:
    """Reads images like data.RecordSource, from every readable record. findings: faults of index and frames. Raises
    CannotCheck if the file is missing or empty, or if no index can be read."""

    def __init__(self, rec_path: Path) -> None:
        self.path = rec_path
        self.findings: list[Finding] = []
        self._file = _open(rec_path)
        idx_path = rec_path.with_suffix(".idx")
        try:
            keys, offsets = read_index(idx_path)
        except FileNotFoundError:
            raise CannotCheck(f"{idx_path} not found; rebuild it: partial-fc data index {rec_path}") from None
        except (ValueError, OSError) as error:
            raise CannotCheck(f"{error}; rebuild the index: partial-fc data index {rec_path}") from None
        is_whole, record_bytes = self._check_frames(keys, offsets)
        self.key_R, self.offset_R = keys[is_whole], offsets[is_whole]
        self._read_headers(record_bytes[is_whole])
        self.image_N = np.flatnonzero(self.content_bytes_R > 0)
        self.key_N = self.key_R[self.image_N]
        if not len(self.image_N):
            raise CannotCheck(f"{rec_path}: none of the {len(keys)} records that {idx_path} lists has an image")

    def __len__(self) -> int:
        return len(self.image_N)

    @property
    def label_N(self) -> NDArray[np.int64]:
        """Returns the labels of the images; NO_LABEL if it is not a whole number."""
        raw = self.raw_label_R[self.image_N]
        label = np.where(are_whole(raw), raw, 0).astype(np.float64)
        # int64 cannot hold every float32.
        return np.where(are_whole(raw), np.clip(label, -_FAR, _FAR), NO_LABEL).astype(np.int64)

    def describe(self, i: int) -> Mapping[str, Any]:
        """Names image i in a finding."""
        label = float(self.raw_label_R[self.image_N[i]])
        return {"key": int(self.key_N[i]), "class": int(label) if label.is_integer() else str(label)}

    def read(self, i: int) -> bytes:
        """The file of image i, without the label header."""
        row = self.image_N[i]
        return self._file.read(int(self.offset_R[row]))[int(self.header_bytes_R[row]) :]

    def in_file_order(self) -> NDArray[np.int64]:
        """Returns the indices of the images in file order."""
        return np.argsort(self.offset_R[self.image_N], kind="stable")

    def close(self) -> None:
        self._file.close()

    # ---- frames

    def _check_frames(
        self, keys: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Returns (which records of the index are whole, bytes of each)."""

        def describe(row: int) -> Mapping[str, Any]:
            return {"key": int(keys[row]), "offset": int(offsets[row])}

        def add(key: str, what: str, which: NDArray[np.bool_]) -> None:
            self._add("error", key, what, which, describe)

        file = self._file
        inside = file.have_room(offsets)
        heads = file.heads(offsets)
        starts = heads.is_frame & (heads.part <= FIRST)
        what = (
            f"offsets of the index are not multiples of 4 below the file's {file.size:,} bytes: the file is truncated, "
            "or the index belongs to another one"
        )
        add("index-offset", what, ~inside)
        what = "offsets of the index do not point to a record: the index is damaged, or belongs to another file"
        add("index-frame", what, inside & ~heads.is_frame)
        what = "offsets of the index point into the middle of a split record"
        add("index-part", what, heads.is_frame & ~starts)
        length, end = heads.length.copy(), offsets + FRAME.size + heads.length
        for row in np.flatnonzero(starts & (heads.part == FIRST)).tolist():
            length[row], end[row] = self._split_record(int(offsets[row]))
        fits = starts & (end <= file.size)
        add("record-cut", "records run past the end of the file: it is truncated", starts & ~fits)
        ordered = np.flatnonzero(fits)[np.argsort(offsets[fits], kind="stable")]
        # The last record's padding may be missing at the end of the file.
        end = np.minimum(end + -end % 4, file.size)
        overlaps = np.zeros(len(offsets), np.bool_)
        overlaps[ordered] = end[ordered] > np.append(offsets[ordered[1:]], file.size)
        what = "records run into the next: their length is damaged, or two keys have one offset"
        add("record-overlap", what, overlaps)
        self._check_gaps(offsets[ordered], end[ordered])
        return fits & ~overlaps, length

    def _split_record(self, offset: int) -> tuple[int, int]:
        """Returns (bytes, end) of a record of several frames; an end past the file if a frame is missing."""
        try:
            parts = self._file.parts(offset)
        except BadRecord:
            return 0, self._file.size + 1
        return sum(end - begin for begin, end in parts) + 4 * (len(parts) - 1), parts[-1][1]

    def _check_gaps(self, start_R: NDArray[np.int64], end_R: NDArray[np.int64]) -> None:
        """Checks the bytes between the indexed records, in file order."""
        before = np.concatenate(([0], np.maximum.accumulate(end_R)))
        after = np.append(start_R, self._file.size)
        nameless, waste = [], []
        for gap in np.flatnonzero(after > before):
            at, stop = int(before[gap]), int(after[gap])
            for part, begin, end in self._file.walk(at, stop):
                if part in (WHOLE, FIRST):
                    nameless.append(begin)
                at = aligned(end)
            if at < stop:
                waste.append(at)
        what = "records of the file are missing from the index: training does not use them"
        self._add("warning", "index-nameless", what, np.array(nameless, np.int64), _offset)
        what = "places of the file hold no records"
        self._add("warning", "file-waste", what, np.array(waste, np.int64), _offset)

    def _add(self, severity: Severity, key: str, what: str, which: NDArray[Any], describe: Describe) -> None:
        self.findings += findings_at(severity, key, what, which, describe, str(self.path))

    # ---- label headers

    def _read_headers(self, record_bytes_R: NDArray[np.int64]) -> None:
        keys = self.key_R
        flag_R, self.raw_label_R = first_labels(self._file, self.offset_R)
        flag_R = flag_R.astype(np.int64)
        self.cut_R = (record_bytes_R < HEADER.size) | (record_bytes_R < HEADER.size + 4 * flag_R)

        def describe(row: int) -> Mapping[str, Any]:
            return {"key": int(keys[row]), "bytes": int(record_bytes_R[row])}

        what = "records are shorter than their label header"
        self._add("error", "record-header", what, self.cut_R, describe)
        self.flag_R = np.where(self.cut_R, 0, flag_R)
        self.header_bytes_R = HEADER.size + 4 * self.flag_R
        self.content_bytes_R = np.where(self.cut_R, 0, record_bytes_R - self.header_bytes_R)
        words, first_R, last = self._file.words, self.offset_R // 4, self._file.size // 4 - 1
        second_R = np.where(self.flag_R < 2, first_R + 3, first_R + 9)
        self.raw_second_R = words[np.minimum(second_R, last)].view("<f4")
        low, high = (words[np.minimum(first_R + at, last)].astype(np.uint64) for at in (4, 5))
        self.id_R = low | high << np.uint64(32)


def _offset(offset: int) -> Mapping[str, Any]:
    return {"offset": offset}


def _open(path: Path) -> RecordFile:
    least = FRAME.size + HEADER.size
    try:
        if path.stat().st_size < least:
            raise CannotCheck(f"{path} has {path.stat().st_size} bytes; expected records")
        return RecordFile(path)
    except OSError as error:
        raise CannotCheck(f"{path}: {error.strerror}; expected a .rec file") from None
