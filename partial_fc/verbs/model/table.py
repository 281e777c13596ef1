"""A file of embeddings that grows by batches: .npz for NumPy, .parquet for tables. N images, D feature width."""

import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from partial_fc.data.sets.parquet import import_pyarrow
from partial_fc.files import replacing

_ROWS_OF_GROUP = 16384  # of parquet: rows read and compressed together


def check_table(path: Path) -> None:
    """Raises ValueError for a path where no such table can be written."""
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"--out {path}: unknown file type; expected .npz or .parquet")
    if not path.parent.is_dir():
        raise ValueError(f"--out {path}: there is no folder {path.parent}; make it first")
    if path.suffix == ".parquet":
        import_pyarrow(path)


class Layout(NamedTuple):
    """The columns of a table. with_labels: has labels. facts: of the model, stored beside the rows."""

    num_rows: int
    width: int
    with_labels: bool
    class_names: list[str] | None
    facts: dict[str, str]


@contextmanager
def new_table(path: Path, layout: Layout) -> "Iterator[_Npz | _Parquet]":
    """Creates a file atomically: complete after the `with` block, absent if it fails."""
    with ExitStack() as opened:
        partial = opened.enter_context(replacing(path))
        table = (_Npz if path.suffix == ".npz" else _Parquet)(opened, partial, layout)
        yield table
        table.finish()


class _Npz:
    """An .npz: keys (N,), labels (N,), embeddings (N, D) float32; class_names, by label, if known; model: JSON."""

    def __init__(self, opened: ExitStack, path: Path, layout: Layout):
        self._layout = layout
        self._archive = opened.enter_context(zipfile.ZipFile(path, "w"))
        self._file = opened.enter_context(self._archive.open("embeddings.npy", "w", force_zip64=True))
        npy.write_array_header_1_0(self._file, {"descr": "<f4", "fortran_order": False, "shape": layout[:2]})
        self._keys: list[str] = []
        self._labels: list[NDArray[np.int64]] = [np.empty(0, np.int64)]

    def add(self, keys: Sequence[str], label_I: NDArray[np.int64], row_ID: NDArray[np.float32]) -> None:
        self._file.write(np.ascontiguousarray(row_ID, "<f4").data)
        self._keys += map(_text, keys)
        self._labels.append(label_I)

    def finish(self) -> None:
        self._file.close()
        arrays: dict[str, Any] = {"keys": np.array(self._keys, np.str_)}
        if self._layout.with_labels:
            arrays["labels"] = np.concatenate(self._labels)
        if self._layout.class_names is not None:
            arrays["class_names"] = np.array([*map(_text, self._layout.class_names)], np.str_)
        arrays |= {f"model_{name}": np.array(value) for name, value in self._layout.facts.items()}
        for name, array in arrays.items():
            with self._archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                npy.write_array(file, array, allow_pickle=False)


class _Parquet:
    """A .parquet: key string, label int64, embedding list of D float32, class string if known; model as metadata."""

    def __init__(self, opened: ExitStack, path: Path, layout: Layout):
        arrow = self._arrow = import_pyarrow(path)
        self._width = layout.width
        self._class_names = None if layout.class_names is None else [*map(_text, layout.class_names)]
        fields = {"key": arrow.string()}
        if layout.with_labels:
            fields["label"] = arrow.int64()
        if layout.class_names is not None:
            fields["class"] = arrow.string()
        fields["embedding"] = arrow.list_(arrow.float32(), layout.width)
        metadata = {f"model_{name}": value for name, value in layout.facts.items()}
        self._schema = arrow.schema(list(fields.items()), metadata=metadata)
        self._file = opened.enter_context(arrow.parquet.ParquetWriter(path, self._schema))
        self._held: list[tuple[Sequence[str], NDArray[np.int64], NDArray[np.float32]]] = []

    def add(self, keys: Sequence[str], label_I: NDArray[np.int64], row_ID: NDArray[np.float32]) -> None:
        self._held.append((keys, label_I, row_ID))
        if sum(len(row) for _, _, row in self._held) >= _ROWS_OF_GROUP:
            self._write()

    def finish(self) -> None:
        if self._held:
            self._write()

    def _write(self) -> None:
        keys = [_text(key) for keys, _, _ in self._held for key in keys]
        label_I = np.concatenate([label for _, label, _ in self._held])
        row_ID = np.concatenate([row for _, _, row in self._held])
        self._held = []
        columns: dict[str, Any] = {"key": keys, "label": label_I}
        if (names := self._class_names) is not None:
            columns["class"] = [names[i] if 0 <= i < len(names) else None for i in label_I.tolist()]
        flat = self._arrow.array(row_ID.reshape(-1), self._arrow.float32())
        columns["embedding"] = self._arrow.FixedSizeListArray.from_arrays(flat, self._width)
        self._file.write_table(self._arrow.Table.from_pydict(columns, schema=self._schema))


def _text(name: str) -> str:
    """Escapes bytes that are not UTF-8, which file names may contain."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
