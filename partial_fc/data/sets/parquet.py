"""Parquet files as the Hugging Face hub has them: a column of images, {bytes, path} or bytes, and one of labels.

A row group is decoded as a whole, so random reading is fast only for a set that fits the cache of decoded groups;
`partial-fc data pack FILE.parquet faces --image-size None` makes a .rec of a larger one. Needs pyarrow.

N rows.
"""

import json
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.labels import KEYS, as_int64, check_inside, in_rows, of_file, of_sample
from partial_fc.data.sample import BadRecord, Sample, Source
from partial_fc.errors import package
from partial_fc.file_kind import it_is
from partial_fc.files import check_regular

_IMAGES = ("image", "img", "jpg", "png")
_CACHE_BYTES = 512 << 20  # of decoded row groups, for each file


class ParquetSource(Source):
    """The images of one file. num_classes: by default the number of names that the file has for its labels, or else
    the largest label + 1. Raises ValueError without the columns, or for a label that is missing or out of range."""

    def __init__(self, path: str | os.PathLike[str], num_classes: int | None = None, num_labels: int = 1) -> None:
        self.path, self.num_labels = Path(path), num_labels
        file = open_parquet(self.path)
        self._image = column_of(self.path, file, _IMAGES)
        label = column_of(self.path, file, KEYS)
        self._label_N = of_file(label_rows(self.path, file.read(columns=[label]).column(0)), self)
        self._starts = [0, *accumulate(file.metadata.row_group(g).num_rows for g in range(file.num_row_groups))]
        self._names = _names(file.schema_arrow.metadata or {}, label)
        largest = int(self._label_N.max())
        self.num_classes = num_classes or max(len(self._names or ()), largest + 1)
        check_inside(self._label_N, self, label)
        self._files, self._lock = threading.local(), threading.Lock()
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._label_N)

    def read(self, index: int) -> Sample:
        group = bisect_right(self._starts, index) - 1
        content = self._decoded(group)[index - self._starts[group]].as_py()
        if not content:
            raise BadRecord(f"{self.where(index)}: no bytes of an image in column {self._image}")
        first, more = of_sample(self._label_N[index], self, index)
        return Sample(content, first, index, more)

    def where(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def labels(self) -> NDArray[np.int64]:
        return self._label_N

    def class_names(self) -> list[str] | None:
        return self._names if self._names and len(self._names) <= self.num_classes else None

    def close(self) -> None:
        self._groups.clear()

    def _decoded(self, group: int) -> Any:
        """Returns the image files of a row group."""
        with self._lock:
            if group in self._groups:
                self._groups.move_to_end(group)
                return self._groups[group]
        if not hasattr(self._files, "file"):
            self._files.file = open_parquet(self.path)
        images = _images(self.path, self._files.file, self._image, group)
        with self._lock:
            self._groups[group] = images
            while len(self._groups) > 1 and sum(one.nbytes for one in self._groups.values()) > _CACHE_BYTES:
                self._groups.popitem(last=False)
        return images


def read_parquet_pairs(path: Path) -> tuple[list[bytes], list[Any]]:
    """Returns (image files, pair k at 2 k and 2 k + 1; labels) of a file with the columns image1, image2 and label."""
    file = open_parquet(path)
    columns = [column_of(path, file, (name,)) for name in ("image1", "image2", "label")]
    images: list[bytes] = []
    for group in range(file.num_row_groups):
        first, second = (_images(path, file, name, group).to_pylist() for name in columns[:2])
        images += [image for pair in zip(first, second, strict=True) for image in pair]
    return images, file.read(columns=["label"]).column(0).to_pylist()


def import_pyarrow(path: Path) -> Any:
    """Imports pyarrow, with pyarrow.parquet. Raises ValueError if it is not installed."""
    package("pyarrow.parquet", f"{path}, unlike an .npz,", "parquet")
    import pyarrow

    return pyarrow


def open_parquet(path: Path) -> Any:
    """Opens a pyarrow.parquet.ParquetFile. Raises ValueError for another file, and without pyarrow."""
    pyarrow = import_pyarrow(path)
    check_regular(path)
    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no Parquet file, or cut short: {error}{it_is(path)}") from None


def column_of(path: Path, file: Any, names: tuple[str, ...]) -> str:
    """Returns the first of these columns that a file has. Raises ValueError if it has none."""
    found = [name for name in names if name in file.schema_arrow.names]
    if not found:
        there = ", ".join(file.schema_arrow.names)
        raise ValueError(f"{path} has no column {' or '.join(names)}; its columns are {there}")
    return found[0]


def _images(path: Path, file: Any, column: str, group: int) -> Any:
    import pyarrow

    try:
        array = file.read_row_group(group, columns=[column], use_threads=False).column(0).combine_chunks()
    except (pyarrow.ArrowException, OSError) as error:
        raise BadRecord(f"{path}, row group {group}: {error}") from None
    if pyarrow.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        array = array.field("bytes")
    if not (pyarrow.types.is_binary(array.type) or pyarrow.types.is_large_binary(array.type)):
        raise ValueError(f"{path}: column {column} has type {array.type}; expected struct<bytes, path> or binary")
    return array


def label_rows(path: Path, column: Any) -> NDArray[np.int64]:
    """Returns the labels of a column of whole numbers, (N,), or of lists of them, (N, M), filled with NONE. Raises
    ValueError for another column."""
    import pyarrow
    from pyarrow import compute

    kind, types = column.type, pyarrow.types
    several = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    flat = compute.list_flatten(column) if several else column
    missing = column.null_count + (flat.null_count if several else 0)
    if not pyarrow.types.is_integer(flat.type) or missing or not len(column):
        what = f"{missing} of its labels are missing" if missing else f"labels are {column.type}"
        raise ValueError(f"{path}: {what if len(column) else 'no rows'}; expected a class number in each row")
    label = as_int64(flat.to_numpy(), path)
    return in_rows(label, compute.list_value_length(column).to_numpy()) if several else label


def _names(metadata: dict[bytes, bytes], label: str) -> list[str] | None:
    """Returns the names of the classes that `datasets` writes into a file."""
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
