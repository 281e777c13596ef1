"""A training set in a .rec folder, as im2rec or InsightFace writes it."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.recordio import RecordReader
from partial_fc.data.sample import BadRecord, Sample
from partial_fc.files import read_bytes, read_text

MAX_CLASSES = 2**24  # labels are stored as float32, exact up to here
_PROPERTY_BYTES = 1 << 16
_EXPECTED = f"expected a whole number of at most {MAX_CLASSES}"

_log = logging.getLogger(__name__)


class RecordSource:
    """`path` is a folder with train.rec, train.idx and maybe `property` (`num_classes,height,width`), or a
    .rec.

    The class count is, in this order: the argument, the property file, the number of identity records, the
    largest label + 1 (which reads the header of every record). image_size: (height, width), where the file says so.
    """

    def __init__(self, path: str | os.PathLike[str], num_classes: int | None = None) -> None:
        path = Path(path)
        rec_path = path / "train.rec" if path.is_dir() else path
        if not rec_path.exists():
            raise ValueError(f"{rec_path} not found; expected a .rec file or a folder with train.rec and train.idx")
        self.reader = RecordReader(rec_path)
        self._keys, num_identities = _image_keys(self.reader)
        if len(self._keys) == 0:
            raise ValueError(f"{rec_path} holds no image records")
        stated, self.image_size = read_property(rec_path.with_name("property"))
        if stated and num_identities and stated != num_identities:
            _log.warning(
                "%s says %d classes, %s holds %d identity records",
                rec_path.with_name("property"), stated, rec_path, num_identities,
            )  # fmt: skip
        self._num_classes = num_classes or stated or num_identities or int(self.labels().max()) + 1
        if self._num_classes < 1:
            raise ValueError(f"{rec_path}: no label is 0 or more; give the number of classes")
        if self._num_classes > MAX_CLASSES:
            raise ValueError(
                f"{rec_path}: {self._num_classes} classes; float32 labels are exact only up to {MAX_CLASSES}"
            )

    @property
    def num_classes(self) -> int:
        return self._num_classes

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, index: int) -> Sample:
        key = int(self._keys[index])
        label, content = self.reader.read_labelled(key)
        if not label.is_integer() or abs(label) > MAX_CLASSES:
            raise BadRecord(f"{self.where(index)}: label {label}, {_EXPECTED}")
        if not content:
            raise BadRecord(f"{self.where(index)}: a label but no image")
        return Sample(content, int(label), key)

    def where(self, index: int) -> str:
        return f"{self.reader.rec_path}, key {self._keys[index]}"

    def key(self, index: int) -> str:
        return str(self._keys[index])

    def will_need(self, indices: Sequence[int]) -> None:
        self.reader.will_need(np.array([self._keys[index] for index in indices], np.int64))

    def read_ahead(self, first: int, stop: int) -> None:
        """Reads samples first to stop - 1 into the page cache. Takes as long as that does."""
        self.reader.read_ahead(np.array([self._keys[index] for index in range(first, stop)], np.int64))

    def labels(self) -> NDArray[np.int64]:
        label = self.reader.first_labels(np.asarray(self._keys))
        whole = are_whole(label) & (np.abs(label) <= MAX_CLASSES)
        if not whole.all():
            index = int(whole.argmin())
            raise BadRecord(f"{self.where(index)}: label {label[index]}, {_EXPECTED}")
        return label.astype(np.int64)

    def class_names(self) -> list[str] | None:
        """The names in classes.txt beside the .rec, one a line (`partial-fc data pack` writes it); None: there is none.
        Raises ValueError where it names more classes than there are."""
        path = self.reader.rec_path.with_name("classes.txt")
        if not path.exists():
            return None
        names = read_text(path, errors="surrogateescape").split("\n")
        names = names[:-1] if names[-1] == "" else names
        if len(names) > self._num_classes:
            raise ValueError(
                f"{path} names {len(names)} classes, {self.reader.rec_path} has {self._num_classes}: is it the list of "
                "another set? Remove it, or bring the right one"
            )
        return names

    def close(self) -> None:
        self.reader.close()


def are_whole(raw_N: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which labels, as records hold them, are whole numbers."""
    with np.errstate(invalid="ignore"):  # NaNs that signal
        return np.isfinite(raw_N) & (raw_N == np.trunc(raw_N))


def read_property(path: Path) -> tuple[int | None, tuple[int, int] | None]:
    """Of a file `property`: (class count, (height, width) of the images) as far as it says so; shuffled sets have a
    count besides."""
    if not path.exists():
        return None, None
    text = read_bytes(path, _PROPERTY_BYTES).strip()
    first, *size = (field.strip() for field in text.split(b"\n")[0].split(b","))
    shown = text[:80].decode("utf-8", "replace")
    if not first.isdigit() or len(first) > 18 or int(first) < 1:
        raise ValueError(f"{path}: expected `num_classes,height,width`, got {shown!r}")
    told = len(size) >= 2 and all(field.isdigit() and len(field) < 6 for field in size[:2])
    return int(first), (int(size[0]), int(size[1])) if told else None


def _image_keys(reader: RecordReader) -> tuple[NDArray[np.int64] | range, int | None]:
    """(keys of the image records, number of identity records or None).

    InsightFace: record 0 holds [first identity key, end of identity keys) and no image; images are 1 to first
    - 1; each identity record holds [first image, end of images) and no image. Anything else: every key is an
    image.
    """
    keys = reader.keys
    if keys[0] != 0:
        return keys, None
    header, content = reader.read_sample(0)
    if header.flag == 0 or content:  # im2rec; with content and flag > 0 it is an image with several labels
        return keys, None
    end = int(keys[-1]) + 1
    if header.flag < 2 or np.float32(end) != header.label[1]:
        raise ValueError(
            f"{reader.rec_path}, key 0: header {header.label[:2].tolist()}, but {reader.idx_path} ends with key "
            f"{end - 1}; expected [first identity key, {end}]. Is this the index of another file?"
        )
    first = _first_identity(reader, float(header.label[0]))
    last_header, _ = reader.read_sample(end - 1)
    if last_header.flag < 2 or last_header.label[1] != header.label[0]:
        raise ValueError(
            f"{reader.rec_path}, key {end - 1}: got {last_header.label[:2].tolist()} as the last identity's "
            f"images, expected [start, {header.label[0]:.0f}): there, says record 0, identity records start"
        )
    if isinstance(keys, range):
        return keys[1:first], end - first
    begin, stop = np.searchsorted(keys, [1, first])
    return keys[begin:stop], len(keys) - int(stop)


def _first_identity(reader: RecordReader, rounded: float) -> int:
    """The key of the first identity record.

    float32 stores it exactly only up to 2^24 (glint360k has 17.1 million images), so the stored number is
    taken for a neighbourhood: in it, the first key without an image that follows a key with one.
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
        f"{reader.rec_path}, key 0: identity records start at {rounded:.0f}, it says; found images or nothing"
    )
