"""Opens a training set by the kind of file at a path, consistently on all ranks."""

import os
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from partial_fc import recipe_table
from partial_fc.data.idx import IdxSource, Split, is_idx_folder
from partial_fc.data.image_folder import ImageFolder, class_folders, image_names
from partial_fc.data.recordio import RecordSource, read_property
from partial_fc.data.sample import Source
from partial_fc.data.sets.parquet import ParquetSource
from partial_fc.data.sets.ranges import as_url
from partial_fc.data.sets.tar_shards import TarSource
from partial_fc.data.vectors import Vectors, holds_vectors
from partial_fc.file_kind import LMDB, kind_of_file
from partial_fc.findings import counted

if TYPE_CHECKING:
    from partial_fc.comm import World


NO_LISTS = (".rec", ".tar", ".parquet")
"""Endings of files that are a set of their own, not a list of images."""
_ANY_LABEL = 2**31  # of a database whose labels nobody has counted


def open_source(
    path: str | os.PathLike[str],
    num_classes: int | None = None,
    root: Path | None = None,
    *,
    vectors: bool = False,
    num_labels: int = 1,
) -> Source:
    """Opens the source at a path: a folder with train.rec, a .rec file, a tar shard (a file or a URL), a .parquet, a
    folder of class folders, a database of images, or a list of images, whose paths are relative to `root`, by default
    the list's folder.
    vectors: a file of vectors, too. num_labels: the most labels of a sample; 1: its first."""
    path = Path(path)
    if vectors and holds_vectors(path):
        return Vectors(path, num_classes, num_labels)
    if as_url(path):
        return TarSource(path, num_classes, num_labels)
    if not path.exists():
        raise ValueError(f"{path} not found; expected a folder with train.rec, a folder of class folders, or a list")
    if path.suffix in (".tar", ".parquet"):
        return (TarSource if path.suffix == ".tar" else ParquetSource)(path, num_classes, num_labels)
    if path.suffix == ".rec" or (path / "train.rec").exists():
        return RecordSource(path, num_classes, num_labels)
    if is_database(path):
        return recipe_table.load(recipe_table.OPEN_DATABASE)(path, None, num_classes, num_labels=num_labels)
    if path.is_dir():
        return ImageFolder(path, num_classes=num_classes, num_labels=num_labels)
    return ImageFolder(root, path, num_classes, num_labels)


def is_database(path: Path) -> bool:
    """Tells a database that recipe imagenet reads: an LMDB (a folder or a file), or a folder with a file CURRENT."""
    return (path / "data.mdb").exists() or (path / "CURRENT").exists() or kind_of_file(path) == LMDB


def open_any(path: Path, root: Path | None, split: Split) -> Source:
    """Opens the images at a path, of any kind, also those of a set for tests. root: base of a list's paths. split: of
    idx files."""
    if is_database(path):
        return recipe_table.load(recipe_table.OPEN_DATABASE)(path, None, _ANY_LABEL)
    if is_idx_folder(path):
        return IdxSource(path, split)
    if path.is_file() and path.suffix not in NO_LISTS:
        return ImageFolder(root, path)
    return open_source(path)


def stated(path: Path) -> tuple[int | None, tuple[int, int] | None]:
    """Returns (number of classes, (height, width)) that a set states without being read: in the file `property` beside
    a .rec, or by its class folders. (None, None): nothing stated, or no set."""
    if path.suffix == ".rec" or (path / "train.rec").exists():
        return read_property(path.with_name("property") if path.suffix == ".rec" else path / "property")
    classes = class_folders(path) if path.is_dir() else []
    return len(classes) if any(image_names(path / name) for name in classes) else None, None


def open_on_all(make: Callable[[], Source], world: "World") -> Source:
    """Opens a source with make() on every rank. Raises ValueError on all ranks if one cannot open it, or sees another
    number of images or classes, or other class names. A collective."""
    from partial_fc.comm import all_gather_json, all_or_raise  # `open_source` alone needs no torch, which takes seconds

    def made() -> Source:
        try:
            return make()
        except OSError as error:  # other hosts may have the file
            raise ValueError(f"{socket.gethostname()}: {error}" if world.size > 1 else str(error)) from error

    source = all_or_raise(made, world, "data/opened")
    names = zlib.crc32("\n".join(source.class_names() or []).encode("utf-8", "surrogateescape"))
    seen = f"{counted(len(source), 'image')}, {counted(source.num_classes, 'class')} (names {names:08x})"
    seen_W = all_gather_json(seen, world, "data/seen")
    if set(seen_W) != {seen}:
        each = ", ".join(f"rank {rank} {seen}" for rank, seen in enumerate(seen_W))
        raise ValueError(f"{world}: the training data is not the same on all ranks: {each}")
    return source
