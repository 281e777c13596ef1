"""`partial-fc data lmdb`: writes images to a database of Caffe's and Caffe2's."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import cv2
import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc.data import ImageFolder, Source
from partial_fc.data.decode import check_proportions, decode
from partial_fc.data.idx import Split
from partial_fc.data.image_folder import write_names
from partial_fc.data.open import open_any
from partial_fc.data.sample import BadRecord, naming, still
from partial_fc.data.transform import short_side
from partial_fc.files import check_new
from partial_fc.findings import counted
from partial_fc.flags.facts import PERCENT, PIXELS, THREADS, In
from partial_fc.verbs.data.left_out import usable

from .databases import DatabaseSource
from .databases.write import Format, encode_record, lmdb_writer

_MOST_LABELS = 2**31  # int32

_log = logging.getLogger("partial_fc")


@dataclass(frozen=True)
class DatabaseOptions:
    """Writes images into an image database (LMDB) of Caffe's or Caffe2's."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A folder of class folders, a list (`path label` a line, or im2rec's .lst), a .rec or its folder, a folder of
    MNIST's idx files, or another image database (LMDB, LevelDB)."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The database to write."""
    format: Format | None = None
    """Caffe's Datum or Caffe2's TensorProtos. Not given: the records of a database are copied as they are, with their
    keys; of anything else, datum."""
    root: Path | None = None
    """The folder that paths of a list are relative to; by default the list's own."""
    split: Split = "train"
    """The set to read from a folder of idx files."""
    size: Annotated[int | None, In(PIXELS)] = None
    """Pixels of the shorter side; the other side is resized in proportion. By default images keep their size."""
    raw: bool = False
    """Write pixels. Otherwise image files: the source's own byte for byte where nothing is resized, else JPEG; PNG
    where the source has pixels."""
    quality: Annotated[int, In(PERCENT)] = 95
    """JPEG quality of re-encoded images."""
    shuffle: bool = False
    """Write the images in random order: Caffe2's trainer reads them in key order."""
    seed: int = 1701
    """Seed of --shuffle."""
    num_workers: Annotated[int, In(THREADS)] = 4
    """Threads that read, decode and encode."""
    max_bad_records: int = 0
    """Unreadable images to report and skip before stopping."""

    @property
    def copies(self) -> bool:
        """Tells whether records of a database are copied unchanged."""
        return self.format is None and self.size is None and not self.raw


def make_lmdb(options: DatabaseOptions) -> None:
    """Writes it. Raises ValueError for unusable images, and where the disk fails."""
    check_new(options.output)
    source = open_any(options.source, options.root, options.split)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    order = np.arange(len(source))
    if options.shuffle:
        order = np.random.default_rng(options.seed).permutation(len(source))
    made = usable(
        lambda number: _record(source, number, int(order[number]), options),
        range(len(order)), options.num_workers, options.max_bad_records, "write",
    )  # fmt: skip
    with lmdb_writer(options.output) as put:
        total = 0
        for _, (key, value) in made:
            put(key, value)
            total += 1
        if not total:
            raise ValueError(f"{options.source}: not one image could be read")
    names = source.class_names()
    if names:
        write_names(options.output / "classes.txt", names)
    labels = "" if isinstance(source, DatabaseSource) else f"; --num_labels {source.num_classes}"
    print(f"{options.output}: {counted(total, 'image')}{labels}")


def _record(source: Source, number: int, index: int, options: DatabaseOptions) -> tuple[bytes, bytes]:
    prefix = b"%08d" % number
    if isinstance(source, DatabaseSource):
        key, value = source.item(index)
        key = prefix + b"_" + key if options.shuffle else key
        if options.copies:
            return key, value
    elif isinstance(source, ImageFolder):
        key = prefix + b"_" + os.fsencode(source.names[index])
    else:
        key = prefix
    sample = source.read(index)
    with naming(source, index):
        image = _image(still(sample), options)
        if not 0 <= sample.label < _MOST_LABELS:
            raise BadRecord(f"label {sample.label}; expected 0 to {_MOST_LABELS - 1}")
    return key, encode_record(image, sample.label, options.format or "datum")


def _image(image: bytes | NDArray[np.uint8], options: DatabaseOptions) -> bytes | NDArray[np.uint8]:
    """Returns the stored form of an image. Decodes it in either case, to detect bad ones."""
    pixel = decode(image) if isinstance(image, bytes) else image
    check_proportions(pixel)
    resized = pixel if options.size is None else short_side(pixel, options.size)  # as make_image_db
    if options.raw:
        return resized
    if isinstance(image, bytes) and resized is pixel:
        return image
    ending, flags = (".jpg", [cv2.IMWRITE_JPEG_QUALITY, options.quality]) if isinstance(image, bytes) else (".png", [])
    return cv2.imencode(ending, np.ascontiguousarray(resized[..., ::-1]), flags)[1].tobytes()
