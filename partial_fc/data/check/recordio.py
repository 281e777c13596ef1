"""Check of a .rec file that lists everything that the training reader would refuse.

Frames and headers are checked a million at a time, in file order; what is kept takes some 40 bytes a record.

R whole records that the index names, in key order; N of them have an image.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.record_files import FIRST, FRAME, WHOLE, RecordFile, aligned, read_index
from partial_fc.data.recordio import HEADER, RecordReader, are_whole, first_labels, images_counted, unpack
from partial_fc.data.sample import BadRecord
from partial_fc.findings import Describe, Finding, Severity, findings_at

NO_LABEL = -(2**62)
_FAR = 2.0**61


_AT_ONCE = 2**20
_FAULTS = {
    "index-offset": "offsets of the index are not multiples of 4 below the file's {size:,} bytes: the file is "
    "truncated, or the index belongs to another one",
    "index-frame": "offsets of the index do not point to a record: the index is damaged, or belongs to another file",
    "index-part": "offsets of the index point into the middle of a split record",
    "record-cut": "records run past the end of the file: it is truncated",
    "record-overlap": "records run into the next: their length is damaged, or two keys have one offset",
}


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
        is_whole, record_bytes = self._check_frames(np.asarray(keys), offsets)
        whole = slice(None) if is_whole.all() else is_whole
        self.key_R, self.offset_R = np.asarray(keys)[whole], offsets[whole]
        self._read_headers(record_bytes[whole])
        self.num_counted = self._images_counted()
        last_key = self.key_R.max(initial=0) if self.num_counted is None else self.num_counted
        of_set = (self.key_R <= last_key) & ((self.key_R > 0) | (self.num_counted is None))
        self.image_N = np.flatnonzero((self.content_bytes_R > 0) & of_set)
        self.key_N = self.key_R[self.image_N]
        self.label_N = self._labels()
        if not len(self.image_N):
            raise CannotCheck(f"{rec_path}: none of the {len(keys)} records that {idx_path} lists has an image")

    def __len__(self) -> int:
        return len(self.image_N)

    def _images_counted(self) -> int | None:
        """Returns what `images_counted` does; None, too, for an index or records that are damaged."""
        try:
            with RecordReader(self.path) as reader:
                return images_counted(reader)
        except ValueError:
            return None

    def _labels(self) -> NDArray[np.int64]:
        """Returns the labels of the images; NO_LABEL if it is not a whole number."""
        raw = self.raw_label_R[self.image_N]
        # int64 cannot hold every float32.
        label_N = np.clip(np.where(are_whole(raw), raw, 0), -_FAR, _FAR).astype(np.int64)
        label_N[~are_whole(raw)] = NO_LABEL
        return label_N

    def describe(self, i: int) -> Mapping[str, Any]:
        """Names image i in a finding."""
        label = float(self.raw_label_R[self.image_N[i]])
        return {"key": int(self.key_N[i]), "class": int(label) if label.is_integer() else str(label)}

    def read(self, i: int) -> bytes:
        """The file of image i, without the label header."""
        return unpack(self._file.read(int(self.offset_R[self.image_N[i]])))[1]

    def in_file_order(self) -> NDArray[np.int64]:
        """Returns the indices of the images in file order."""
        return np.argsort(self.offset_R[self.image_N], kind="stable")

    def close(self) -> None:
        self._file.close()

    # ---- frames

    def _check_frames(
        self, keys: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Returns (which records of the index are whole, bytes of each)."""

        def describe(row: int) -> Mapping[str, Any]:
            return {"key": int(keys[row]), "offset": int(offsets[row])}

        file = self._file
        faults: dict[str, list[NDArray[np.int64]]] = {key: [] for key in _FAULTS}
        is_whole, bytes_R = np.zeros(len(offsets), np.bool_), np.zeros(len(offsets), np.int32)
        order = None if (offsets[1:] >= offsets[:-1]).all() else np.argsort(offsets, kind="stable")
        gaps: list[tuple[int, int]] = []
        row, end, furthest = 0, 0, 0  # the last whole record, its end, and that of all so far
        for first in range(0, len(offsets), _AT_ONCE):
            stop = min(first + _AT_ONCE, len(offsets))
            row_n = np.arange(first, stop) if order is None else order[first:stop]
            offset_n = offsets[row_n]
            inside, heads = file.have_room(offset_n), file.heads(offset_n)
            starts = heads.is_frame & (heads.part <= FIRST)
            length_n, end_n = heads.length, offset_n + FRAME.size + heads.length
            for i in np.flatnonzero(starts & (heads.part == FIRST)).tolist():
                length_n[i], end_n[i] = self._split_record(int(offset_n[i]))
            fits = starts & (end_n <= file.size)
            is_whole[row_n], bytes_R[row_n] = fits, np.minimum(length_n, np.iinfo(np.int32).max)
            faults["index-offset"].append(row_n[~inside])
            faults["index-frame"].append(row_n[inside & ~heads.is_frame])
            faults["index-part"].append(row_n[heads.is_frame & ~starts])
            faults["record-cut"].append(row_n[starts & ~fits])
            # The last record's padding may be missing at the end of the file.
            begin_n, stop_n = offset_n[fits], np.minimum(end_n + -end_n % 4, file.size)[fits]
            rows, ends = np.append(row, row_n[fits]), np.append(end, stop_n)
            faults["record-overlap"].append(rows[:-1][ends[:-1] > begin_n])
            before_n = np.maximum.accumulate(np.append(furthest, stop_n))
            gaps += [(int(before_n[i]), int(begin_n[i])) for i in np.flatnonzero(begin_n > before_n[:-1])]
            row, end, furthest = int(rows[-1]), int(ends[-1]), int(before_n[-1])
            file.unmap()
        for key, what in _FAULTS.items():
            which = np.sort(np.concatenate(faults[key]))
            self._add("error", key, what.format(size=file.size), which, describe)
            if key == "record-overlap":
                is_whole[which] = False
        self._check_gaps(gaps + ([(furthest, file.size)] if furthest < file.size else []))
        return is_whole, bytes_R

    def _split_record(self, offset: int) -> tuple[int, int]:
        """Returns (bytes, end) of a record of several frames; an end past the file if a frame is missing."""
        try:
            parts = self._file.parts(offset)
        except BadRecord:
            return 0, self._file.size + 1
        return sum(end - begin for begin, end in parts) + 4 * (len(parts) - 1), parts[-1][1]

    def _check_gaps(self, gaps: list[tuple[int, int]]) -> None:
        """Checks the bytes between the indexed records."""
        nameless, waste = [], []
        for at, stop in gaps:
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

    def _read_headers(self, record_bytes_R: NDArray[np.int32]) -> None:
        num = len(self.offset_R)
        self.cut_R, self.content_bytes_R = np.zeros(num, np.bool_), np.zeros(num, np.int32)
        self.raw_label_R = np.zeros(num, np.float32)
        for start in range(0, num, _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            flag, label_R1 = first_labels(self._file, self.offset_R[part])
            self.raw_label_R[part] = label_R1[:, 0]
            left = record_bytes_R[part] - HEADER.size - 4 * flag
            self.cut_R[part], self.content_bytes_R[part] = left < 0, np.maximum(left, 0)
            self._file.unmap()

        def describe(row: int) -> Mapping[str, Any]:
            return {"key": int(self.key_R[row]), "bytes": int(record_bytes_R[row])}

        what = "records are shorter than their label header"
        self._add("error", "record-header", what, self.cut_R, describe)

    def flag(self, row: int) -> int:
        return 0 if self.cut_R[row] else int(first_labels(self._file, self.offset_R[[row]])[0][0])

    def second_labels(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the second label of records with several."""
        at = self.offset_R[rows] // 4
        many = first_labels(self._file, self.offset_R[rows])[0] >= 2
        return self._words(np.where(many, at + 9, at + 3)).view("<f4")

    def wrong_ids(self) -> NDArray[np.int64]:
        """Returns the images whose record has another id than its key."""
        wrong = []
        for start in range(0, len(self), _AT_ONCE):
            key = self.key_N[start : start + _AT_ONCE]
            differ = self.ids(self.image_N[start : start + _AT_ONCE]) != key.astype(np.uint64)
            wrong.append(start + np.flatnonzero(differ))
            self._file.unmap()
        return np.concatenate(wrong)

    def ids(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        at = self.offset_R[rows] // 4
        low, high = (self._words(at + word).astype(np.uint64) for word in (4, 5))
        return low | high << np.uint64(32)

    def _words(self, at: NDArray[np.int64]) -> NDArray[np.uint32]:
        return self._file.words[np.minimum(at, self._file.size // 4 - 1)]


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
