"""`partial-fc data pack`: packs images into train.rec, .idx, .lst and property."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from partial_fc import printable
from partial_fc.data import ImageFolder, open_source
from partial_fc.data.decode import encode_square
from partial_fc.data.image_folder import write_names
from partial_fc.data.labels import NONE
from partial_fc.data.recordio import MAX_CLASSES, RecordWriter, pack, write_index
from partial_fc.data.sample import naming, still
from partial_fc.data.sets.joined import matching
from partial_fc.data.sets.tar_shards import write_tar_index
from partial_fc.files import check_new
from partial_fc.findings import counted
from partial_fc.flags.facts import PERCENT, PIXELS, THREADS, In
from partial_fc.verbs.data.left_out import usable

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackOptions:
    """Packs images into a .rec folder that this trainer and InsightFace read."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A folder of class folders, a list (`path label` a line, or im2rec's .lst), a .rec folder, or a database."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder to write to."""
    root: Path | None = None
    """The folder that paths of a list are relative to; by default the list's own."""
    image_size: Annotated[int | None, In(PIXELS)] = 112
    """Resize (shorter side, then the middle square) and write as JPEG. Images of this size, and with none all
    images, are copied byte for byte."""
    pad: bool = False
    """Add black bars to images that are not square (crops of 112 x 96), which lose rows or columns otherwise."""
    quality: Annotated[int, In(PERCENT)] = 95
    """JPEG quality of re-encoded images."""
    plain: bool = False
    """im2rec's layout, keys from 0. Otherwise InsightFace's: sorted by class, with identity records."""
    labels: Annotated[int, In("[1, 1000]")] = 1
    """The most labels of an image, with --plain; 1: the first of each is written."""
    num_workers: Annotated[int, In(THREADS)] = 4
    """Threads that read, decode and encode."""
    max_bad_records: int = 0
    """Unreadable images to report and skip before stopping."""


def pack_images(options: PackOptions) -> None:
    """Writes the four files, and classes.txt (the folder names in label order)."""
    if options.labels > 1 and not options.plain:
        raise ValueError(
            f"--labels {options.labels}: InsightFace's layout has one identity for each image; add --plain"
        )
    source = open_source(options.source, root=options.root, num_labels=options.labels)
    if source.num_classes > MAX_CLASSES:
        raise ValueError(f"{source.num_classes} classes; float32 labels of a .rec are exact only up to {MAX_CLASSES}")
    check_new(options.output / "train.rec")
    options.output.mkdir(parents=True, exist_ok=True)
    label_N = source.labels()
    assert label_N is not None  # opened without a number of classes, it has counted them
    # Identity records need the images of a class to be consecutive.
    order = np.arange(len(source)) if options.plain else np.argsort(label_N, kind="stable")
    first_key = 0 if options.plain else 1

    def encoded(index: int) -> bytes:
        with naming(source, index):
            return encode_square(still(source.read(index)), options.image_size, options.quality, options.pad)

    num_packed, all_labels = 0, []  # of the written images
    with (
        RecordWriter(options.output / "train.rec") as writer,
        open(options.output / "train.lst", "w", encoding="utf-8", errors="surrogateescape") as lst,
    ):
        images = usable(encoded, order.tolist(), options.num_workers, options.max_bad_records, "pack")
        for index, content in images:
            key, labels = first_key + num_packed, label_N[index].reshape(-1).tolist()
            labels = [label for label in labels if label != NONE or options.labels == 1]
            name = source.names[index] if isinstance(source, ImageFolder) else source.where(index)
            stored = labels[0] if len(labels) == 1 else labels
            writer.write(key, pack(stored if options.plain else [labels[0], 1.0], content, id=key))
            # im2rec: index, labels, path. InsightFace's face2rec: aligned, path, label.
            texts = "\t".join(f"{label:f}" for label in labels)
            lst.write(f"{key}\t{texts}\t{name}\n" if options.plain else f"1\t{name}\t{labels[0]}\n")
            num_packed += 1
            all_labels += labels
        if not num_packed:
            raise ValueError(f"{options.source}: not one image could be read")
        count_C = np.bincount(all_labels, minlength=source.num_classes)
        if not options.plain:
            write_identities(writer, count_C)
    size = options.image_size or 0
    (options.output / "property").write_text(f"{source.num_classes},{size},{size}\n")
    if class_names := source.class_names():
        write_names(options.output / "classes.txt", class_names)
    if isinstance(source, ImageFolder) and source.left_out:
        _log.warning("%s: files are left out: %s", options.source, source.left_out_text())
    _report(options.output, num_packed, count_C, source.class_names())


@dataclass(frozen=True)
class IndexOptions:
    """Writes the index of tar shards, with which they can be trained on, or rebuilds the .idx of a .rec."""

    source: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE ...")]
    """A .rec, whose keys will be the ids stored in its records, or else their order in the file; or tar shards: files,
    URLs or patterns in quotes. The index is written beside the file; of a URL, into this user's cache."""
    picture: str | None = None
    """Which picture to use where samples of a shard have several: `left` or `left.png` of KEY.left.png."""


def make_index(options: IndexOptions) -> None:
    """Writes the index of each source. A .rec must not have one."""
    for path in (file for pattern in options.source for file in matching(pattern)):
        if path.suffix == ".tar":
            index, count = write_tar_index(path, options.picture)
            print(f"{index}: {counted(count, 'image')}")
            continue
        if options.picture:
            raise ValueError(f"--picture {options.picture}: {path} is no tar shard; its records have one picture")
        idx_path = path.with_suffix(".idx")
        check_new(idx_path)
        print(f"{idx_path}: {counted(write_index(path), 'record')}")


def write_identities(writer: RecordWriter, count_C: np.ndarray) -> None:
    """Writes record 0 and InsightFace's identity records, for images under keys 1, 2, ... sorted by class."""
    end_C = 1 + np.cumsum(count_C)
    first = int(end_C[-1])
    writer.write(0, pack([first, first + len(count_C)], b""))
    for label, (count, end) in enumerate(zip(count_C.tolist(), end_C.tolist(), strict=True)):
        writer.write(first + label, pack([end - count, end], b"", id=first + label))


def _report(output: Path, num_images: int, count_C: np.ndarray, class_names: list[str] | None) -> None:
    least, most, median = int(count_C.min()), int(count_C.max()), int(np.median(count_C))
    each = str(least) if least == most else f"{least} to {most}, half of them at most {median}"
    print(f"{output}: {counted(num_images, 'image')} of {counted(len(count_C), 'class')}; a class has {each}")
    for number, what in ((0, "no image"), (1, "one image only")):
        labels = np.flatnonzero(count_C == number)
        if len(labels):
            first = ", ".join(printable.name(class_names[c] if class_names else c) for c in labels[:10].tolist())
            _log.warning("%s with %s, the first: %s", counted(len(labels), "class"), what, first)
