"""RecordIO (train.rec, train.idx): labelled records, their writer, and a set of them as a source.

A record starts with a label header (`pack`, `unpack`), 24 bytes `<IfQQ`: flag, label, id, id2. If flag > 0, that many
float32 labels follow and the label field is unused; then comes the image file. record_files.py has the files. (The
format is that of InsightFace's data, im2rec's.)

R records.
"""

import logging
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.labels import NONE, listed, of_sample
from partial_fc.data.record_files import (
    FIRST,
    FRAME,
    LAST,
    MAGIC,
    MAGIC_BYTES,
    MAX_RECORD_BYTES,
    MIDDLE,
    WHOLE,
    RecordFile,
    aligned,
    read_index,
)
from partial_fc.data.sample import BadRecord, Sample, Source
from partial_fc.files import read_bytes, read_text, replacing
from partial_fc.findings import counted

HEADER = struct.Struct("<IfQQ")
_LABEL_AT = 4  # of a single one, in the header
_PIECE_BYTES = 2**20
_LABELS_AT_ONCE = 2**20
MAX_CLASSES = 2**24  # labels are stored as float32, exact up to here
_PROPERTY_BYTES = 1 << 16
_EXPECTED = f"expected a whole number of at most {MAX_CLASSES}"

_log = logging.getLogger(__name__)


class Header(NamedTuple):
    """The label header of a record. label: float32 (n,); a header of flag 0 gives n = 1."""

    flag: int
    label: NDArray[np.float32]
    id: int
    id2: int


def pack(label: float | Sequence[float] | NDArray[np.float32], content: bytes, id: int = 0, id2: int = 0) -> bytes:
    """Encodes a record: a number as flag 0, a sequence of n numbers as flag n; same bytes as mx.recordio.pack."""
    if isinstance(label, (int, float, np.number)):
        return HEADER.pack(0, label, id, id2) + content
    array = np.asarray(label, dtype="<f4")
    return HEADER.pack(array.size, 0.0, id, id2) + array.tobytes() + content


def unpack(record: bytes) -> tuple[Header, bytes]:
    """Returns the label header and the rest (empty in InsightFace's header records)."""
    if len(record) < HEADER.size:
        raise BadRecord(f"label header cut off: got {len(record)} bytes, expected at least {HEADER.size}")
    flag, _, id, id2 = HEADER.unpack_from(record)
    start = HEADER.size + 4 * flag
    if len(record) < start:
        raise BadRecord(f"label header cut off: got {len(record)} bytes, flag {flag} needs at least {start}")
    labels = np.frombuffer(record, "<f4", flag or 1, HEADER.size if flag else _LABEL_AT)
    return Header(flag, labels, id, id2), record[start:]


class RecordWriter(ExitStack):
    """Writes NAME.rec and NAME.idx byte for byte as mx.recordio.MXIndexedRecordIO does.

    Both files get their names only when the writer closes without an exception, so an interrupted run never leaves a
    file that looks complete.
    """

    def __init__(self, rec_path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.rec_path = Path(rec_path)
        idx, rec = (self.enter_context(replacing(self.rec_path.with_suffix(end))) for end in (".idx", ".rec"))
        self._rec = self.enter_context(rec.open("wb"))
        self._idx = self.enter_context(idx.open("w", newline="\n"))
        self._offset = 0

    def write(self, key: int, record: bytes) -> None:
        if len(record) > MAX_RECORD_BYTES:
            raise ValueError(
                f"{self.rec_path}, key {key}: record of {len(record)} bytes; RecordIO holds at most {MAX_RECORD_BYTES}"
            )
        self._idx.write(f"{key}\t{self._offset}\n")
        # The multiples of 4 with the magic number, which cannot overlap itself.
        starts = [found.start() for found in re.finditer(re.escape(MAGIC_BYTES), record) if found.start() % 4 == 0]
        begin = 0
        for i, cut in enumerate(starts):
            self._write_part(FIRST if i == 0 else MIDDLE, record[begin:cut])
            begin = cut + len(MAGIC_BYTES)
        self._write_part(LAST if starts else WHOLE, record[begin:])

    def _write_part(self, part: int, content: bytes) -> None:
        padding = -len(content) % 4
        self._rec.write(FRAME.pack(MAGIC, part << 29 | len(content)))
        self._rec.write(content)
        self._rec.write(bytes(padding))
        self._offset += FRAME.size + len(content) + padding


class RecordReader:
    """Random access to the records of one .rec file by key. Any number of threads may read at once.

    Maps the file: opening does not read it, and processes of one machine share the pages. The index takes 8 bytes a
    record if the keys are 0, 1, 2, ..., else 16.
    """

    def __init__(self, rec_path: str | os.PathLike[str]) -> None:
        self.rec_path = Path(rec_path)
        self.idx_path = self.rec_path.with_suffix(".idx")
        if not self.idx_path.exists():
            raise ValueError(
                f"{self.idx_path} not found; it tells where each record of {self.rec_path} starts. "
                f"Rebuild it: partial-fc data index {self.rec_path}"
            )
        self._file = RecordFile(self.rec_path)
        # Records are read in random order: read-ahead would fetch many times what is used.
        self._file.map.madvise(mmap.MADV_RANDOM)
        self.keys, self.offset_R = read_index(self.idx_path)
        self._mean_bytes = self._file.size // len(self.keys)
        bad = (self.offset_R < 0) | (self.offset_R % 4 != 0) | (self.offset_R > self._file.size - FRAME.size)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{self.idx_path}: key {self.keys[row]} has offset {self.offset_R[row]}; expected a multiple of 4 "
                f"below {self._file.size}, the size of {self.rec_path}. {int(bad.sum())} of {len(self.keys)} are "
                f"wrong: the record file is cut short, or the index belongs to another one"
            )

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, key: int) -> bytes:
        """Returns the payload of a key. Raises KeyError for an unknown key, BadRecord for a damaged record."""
        try:
            return self._file.read(self._offset_of(key))
        except BadRecord as error:
            raise BadRecord(f"{self.rec_path}, key {key}, {error}") from None

    def read_sample(self, key: int) -> tuple[Header, bytes]:
        """Returns the label header of a key and the rest of the record. Raises as `read`."""
        record = self.read(key)
        try:
            return unpack(record)
        except BadRecord as error:
            raise BadRecord(f"{self.rec_path}, key {key}: {error}") from None

    def will_need(self, keys: NDArray[np.int64]) -> None:
        """Asks the kernel to fetch records and returns at once, so that a disk can sort many reads."""
        starts = self.offset_R[self._rows_of(keys)] // mmap.PAGESIZE * mmap.PAGESIZE
        # The lengths are unknown before reading. Twice the mean covers nearly all records.
        num_bytes = np.minimum(2 * self._mean_bytes + mmap.PAGESIZE, self._file.size - starts)
        for start, count in zip(starts.tolist(), num_bytes.tolist(), strict=True):
            self._file.map.madvise(mmap.MADV_WILLNEED, start, count)

    def read_ahead(self, keys: NDArray[np.int64]) -> None:
        """Reads the range from the first to the last of these records, in large pieces, into the page cache."""
        offsets = self.offset_R[self._rows_of(keys)]
        with open(self.rec_path, "rb", buffering=0) as file:
            at, stop = int(offsets.min()), int(offsets.max()) + 2 * self._mean_bytes
            while at < stop and (count := len(os.pread(file.fileno(), min(_PIECE_BYTES, stop - at), at))):
                at += count

    def first_labels(self, keys: NDArray[np.int64], most: int = 1) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Returns how many labels each record has, and the first `most` of them, float32 (len(keys), most), undefined
        where there are fewer, from the headers and without a Python loop. Raises BadRecord for the first record whose
        frame or header is cut short before these labels."""
        offset_R = self.offset_R[self._rows_of(keys)]
        words = np.frombuffer(self._file.map, "<u4", self._file.size // 4)
        at_R, last = offset_R // 4, len(words) - 1
        flag_R = words[np.minimum(at_R + 2, last)].astype(np.int64)
        first_R = at_R + np.where(flag_R == 0, 3, 8)
        label_RK = words[np.minimum(first_R[:, None] + np.arange(most), last)].view("<f4")
        count_R = np.maximum(flag_R, 1)
        # Others are damaged, or split within their header.
        least_R = HEADER.size + 4 * np.minimum(flag_R, most)
        length_R = (words[at_R + 1] & MAX_RECORD_BYTES).astype(np.int64)
        held_R = np.minimum(length_R, self._file.size - FRAME.size - offset_R)
        is_odd_R = (words[at_R] != MAGIC) | (held_R < least_R)
        del words  # a map cannot be closed while an array refers to it, also one of an error's frame
        for row in np.flatnonzero(is_odd_R).tolist():
            label = self.read_sample(int(keys[row]))[0].label
            count_R[row] = len(label)
            label_RK[row, : len(label)] = label[:most]
        return count_R, label_RK

    def close(self) -> None:
        self._file.map.close()

    def _offset_of(self, key: int) -> int:
        if isinstance(self.keys, range):
            row = key if 0 <= key < len(self.keys) else -1
        else:
            row = int(np.searchsorted(self.keys, key))
            row = row if row < len(self.keys) and self.keys[row] == key else -1
        if row < 0:
            raise KeyError(f"{self.idx_path}: no record has key {key}; keys are {self.keys[0]} to {self.keys[-1]}")
        return int(self.offset_R[row])

    def _rows_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        return keys if isinstance(self.keys, range) else np.searchsorted(self.keys, keys)


def write_index(rec_path: str | os.PathLike[str]) -> int:
    """Rebuilds the .idx of a .rec and returns the number of records. Keys are the records' ids; if these are not unique
    or not below 2^63, the keys are 0, 1, 2, ... in file order. Raises BadRecord for a damaged frame."""
    rec_path = Path(rec_path)
    file = RecordFile(rec_path)
    offsets: list[int] = []
    ids: list[int] = []
    at = 0
    while at < file.size:
        try:
            parts = file.parts(at)
        except BadRecord as error:
            raise BadRecord(f"{rec_path}, after {counted(len(offsets), 'record')}: {error}") from None
        offsets.append(at)
        begin, end = parts[0]
        if end - begin >= HEADER.size:
            ids.append(HEADER.unpack_from(file.map, begin)[2])
        at = aligned(parts[-1][1])
    file.map.close()
    keys = ids if len(set(ids)) == len(offsets) and max(ids) < 2**63 else range(len(offsets))
    idx_path = rec_path.with_suffix(".idx")
    with replacing(idx_path) as partial, partial.open("w", newline="\n") as out:
        out.writelines(f"{key}\t{offset}\n" for key, offset in zip(keys, offsets, strict=True))
    return len(offsets)


# ---- a training set


class RecordSource(Source):
    """A RecordIO set. `path`: a folder with train.rec, train.idx and maybe `property` (`num_classes,height,width`), or
    a .rec.

    The class count is, in this order: the argument, the property file, the number of identity records, the largest
    label + 1 (which reads every record's header). image_size: (height, width), if stated.
    """

    def __init__(self, path: str | os.PathLike[str], num_classes: int | None = None, num_labels: int = 1) -> None:
        path, self.num_labels = Path(path), num_labels
        rec_path = path / "train.rec" if path.is_dir() else path
        if not rec_path.exists():
            raise ValueError(f"{rec_path} not found; expected a .rec file or a folder with train.rec and train.idx")
        self.reader = RecordReader(rec_path)
        self._keys, num_identities = _image_keys(self.reader)
        if len(self._keys) == 0:
            raise ValueError(f"{rec_path} holds no image records")
        if num_labels > 1 and num_identities:
            raise ValueError(
                f"{rec_path} has identity records: each image is of one identity, and further numbers in its header "
                f"are no labels (--labels {num_labels}). Leave --labels out, or pack the images with their labels: "
                "partial-fc data pack --plain --labels"
            )
        stated, self.image_size = read_property(rec_path.with_name("property"))
        if stated and num_identities and stated != num_identities:
            _log.warning(
                "%s says %d classes, %s holds %d identity records",
                rec_path.with_name("property"), stated, rec_path, num_identities,
            )  # fmt: skip
        self.num_classes = num_classes or stated or num_identities or self._largest_label() + 1
        if self.num_classes < 1:
            raise ValueError(f"{rec_path}: no label is 0 or more; give the number of classes")
        if self.num_classes > MAX_CLASSES:
            raise ValueError(
                f"{rec_path}: {self.num_classes} classes; float32 labels are exact only up to {MAX_CLASSES}"
            )

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, index: int) -> Sample:
        key = int(self._keys[index])
        header, content = self.reader.read_sample(key)
        if not content:
            raise BadRecord(f"{self.where(index)}: a label but no image")
        if self.num_labels > 1:
            first, more = of_sample(header.label, self, index)
            return Sample(content, first, key, more)
        label = float(header.label[0])
        if not label.is_integer() or abs(label) > MAX_CLASSES:
            raise BadRecord(f"{self.where(index)}: label {label}, {_EXPECTED}")
        return Sample(content, int(label), key)

    def where(self, index: int) -> str:
        return f"{self.reader.rec_path}, key {self._keys[index]}"

    def key(self, index: int) -> str:
        return str(self._keys[index])

    def will_need(self, indices: Sequence[int]) -> None:
        self.reader.will_need(np.array([self._keys[index] for index in indices], np.int64))

    def read_ahead(self, first: int, stop: int) -> None:
        """Reads samples first to stop - 1 into the page cache; blocks until done."""
        self.reader.read_ahead(np.array([self._keys[index] for index in range(first, stop)], np.int64))

    def layout(self) -> Iterator[NDArray[np.int64]]:
        yield self.reader.offset_R  # also of identity records; a range's keys follow from their number
        if not isinstance(self._keys, range):
            yield self._keys

    def labels(self) -> NDArray[np.int64]:
        return self._labels(0, len(self))

    def _labels(self, start: int, stop: int) -> NDArray[np.int64]:
        if self.num_labels > 1:
            return self._several_labels(start, stop)
        label = self.reader.first_labels(np.asarray(self._keys[start:stop]))[1][:, 0]
        whole = are_whole(label) & (np.abs(label) <= MAX_CLASSES)
        if not whole.all():
            index = start + int(whole.argmin())
            raise BadRecord(f"{self.where(index)}: label {label[index - start]}, {_EXPECTED}")
        return label.astype(np.int64)

    def _several_labels(self, start: int, stop: int) -> NDArray[np.int64]:
        key_R = np.asarray(self._keys[start:stop])
        count_R, raw_RK = self.reader.first_labels(key_R, self.num_labels)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            real_RK = (np.arange(self.num_labels) < count_R[:, None]) & (raw_RK != NONE)
            whole_RK = are_whole(raw_RK) & (np.abs(raw_RK) <= MAX_CLASSES)
            label_RK = np.where(real_RK & whole_RK, raw_RK, NONE).astype(np.int64)
        odd_R = (count_R > self.num_labels) | (real_RK & ~whole_RK).any(axis=1) | ~real_RK[:, 0]
        for row in np.flatnonzero(odd_R).tolist():
            labels = listed(self.reader.read_sample(int(key_R[row]))[0].label, self, start + row)
            label_RK[row] = NONE
            label_RK[row, : len(labels)] = labels
        return label_RK

    def _largest_label(self) -> int:
        starts = range(0, len(self._keys), _LABELS_AT_ONCE)
        return max(int(self._labels(start, start + _LABELS_AT_ONCE).max()) for start in starts)

    def label_bytes(self) -> int:
        return self.reader.rec_path.stat().st_size

    def class_names(self) -> list[str] | None:
        return read_class_names(self.reader.rec_path, self.num_classes)

    def close(self) -> None:
        self.reader.close()


def read_class_names(path: Path, num_classes: int) -> list[str] | None:
    """Returns the names in classes.txt beside a set's file, one a line (written by `partial-fc data pack`), or None.
    Raises ValueError if it has more names than classes."""
    beside = path.with_name("classes.txt")
    if not beside.exists():
        return None
    names = read_text(beside, errors="surrogateescape").split("\n")
    names = names[:-1] if names[-1] == "" else names
    if len(names) > num_classes:
        raise ValueError(
            f"{beside} names {len(names)} classes, {path} has {num_classes}: remove it, or bring that of this set"
        )
    return names


def are_whole(raw_N: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Tells which stored labels are whole numbers."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.isfinite(raw_N) & (raw_N == np.trunc(raw_N))


def read_property(path: Path) -> tuple[int | None, tuple[int, int] | None]:
    """Reads a file `property`: (class count, (height, width) of the images), None for what it does not state. Ignores
    the further number in files of shuffled sets."""
    if not path.exists():
        return None, None
    text = read_bytes(path, _PROPERTY_BYTES).strip()
    first, *size = (field.strip() for field in text.split(b"\n")[0].split(b","))
    shown = text[:80].decode("utf-8", "replace")
    if not first.isdigit() or len(first) > 18 or int(first) < 1:
        raise ValueError(f"{path}: expected `num_classes,height,width`, got {shown!r}")
    has_size = len(size) >= 2 and all(field.isdigit() and len(field) < 6 for field in size[:2])
    return int(first), (int(size[0]), int(size[1])) if has_size else None


def _image_keys(reader: RecordReader) -> tuple[NDArray[np.int64] | range, int | None]:
    """Returns (keys of the image records, number of identity records or None).

    InsightFace: record 0 holds [first identity key, end of identity keys) and no image; images are 1 to first - 1; each
    identity record holds [first image, end of images) and no image. Others write record 0 as [number of images + 1,
    number of classes, ...] and no identity records, some with a picture behind it that is none of the set's:
    arcface_torch reads keys 1 to label[0] - 1 of either. Otherwise every key is an image.
    """
    keys = reader.keys
    if keys[0] != 0:
        return keys, None
    header, content = reader.read_sample(0)
    if header.flag == 0:  # im2rec
        return keys, None
    end = int(keys[-1]) + 1
    if (num_images := images_counted(reader)) is not None:
        if num_images < end - 1:
            _log.warning("%s, key 0: it counts %d images; the keys behind are not read", reader.rec_path, num_images)
        begin, stop = (1, num_images + 1) if isinstance(keys, range) else np.searchsorted(keys, [1, num_images + 1])
        return keys[begin:stop], None
    if content:  # an image with several labels
        return keys, None
    if header.flag < 2 or np.float32(end) != header.label[1]:
        raise ValueError(
            f"{reader.rec_path}, key 0: no image, and the numbers {header.label[:3].tolist()}, but {reader.idx_path} "
            f"ends with key {end - 1}; expected [first identity key, {end}], "
            f"or without identity records [number of images + 1, number of classes]"
        )
    first = _first_identity(reader, float(header.label[0]))
    last_header, _ = reader.read_sample(end - 1)
    if last_header.flag < 2 or last_header.label[1] != header.label[0]:
        raise ValueError(
            f"{reader.rec_path}, key {end - 1}: got {last_header.label[:2].tolist()} as the last identity's "
            f"images, expected [start, {header.label[0]:.0f}): where identity records start according to record 0"
        )
    if isinstance(keys, range):
        return keys[1:first], end - first
    begin, stop = np.searchsorted(keys, [1, first])
    return keys[begin:stop], len(keys) - int(stop)


def images_counted(reader: RecordReader) -> int | None:
    """Returns the number of images that record 0 counts, in a set without identity records; None: it counts none. A
    record 0 with a picture counts if its first number is right, and is not one of several labels: the others have
    another number of labels, or its second number is that of their classes."""
    keys = reader.keys
    end = int(keys[-1]) + 1
    (header, content), (_, last_content) = reader.read_sample(int(keys[0])), reader.read_sample(end - 1)
    if keys[0] != 0 or len(keys) < 2 or header.flag < 2 or not last_content:
        return None
    first = float(header.label[0])
    if first != np.float32(end):
        fits = not content and isinstance(keys, range) and first.is_integer() and 2 <= first < end
        # Identity records there: InsightFace's layout, with images behind them.
        return int(first) - 1 if fits and reader.read_sample(int(first))[1] else None
    if content and reader.read_sample(int(keys[1]))[0].flag == header.flag:
        largest = reader.first_labels(np.asarray(keys[1:]))[1].max()
        return end - 1 if largest + 1 == header.label[1] else None
    return end - 1


def _first_identity(reader: RecordReader, rounded: float) -> int:
    """Returns the key of the first identity record.

    float32 stores it exactly only up to 2^24 (glint360k has 17.1 million images), so the key is searched near the
    stored number: the first one without an image that follows a key with one.
    """
    keys = reader.keys
    near: range | tuple[int, ...] = ()
    if 1 <= rounded <= 2 * keys[-1]:
        spread = int(np.spacing(np.float32(rounded))) if rounded >= 2**24 else 0
        near = range(int(rounded) - spread, int(rounded) + spread + 1)
    for key in near:
        row = key if isinstance(keys, range) else int(np.searchsorted(keys, key))
        if row == 0 or row >= len(keys) or keys[row] != key or np.float32(key) != np.float32(rounded):
            continue
        if not reader.read_sample(key)[1] and (keys[row - 1] == 0 or reader.read_sample(int(keys[row - 1]))[1]):
            return key
    raise ValueError(
        f"{reader.rec_path}, key 0: it says that identity records start at {rounded:.0f}; found images there, or no "
        "record"
    )
