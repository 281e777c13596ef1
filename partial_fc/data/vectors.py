"""A source of vectors: embeddings of another network, or any features. N vectors of D numbers, C classes.

    FILE.npz        embeddings (N, D) and labels (N,), as `partial-fc embed` writes them; class_names (C,) if known, and
                    keys (N,), which messages name
    NAME.npy        (N, D), with the labels (N,) in NAME.labels.npy beside it
    FILE.parquet    columns embedding (lists of D numbers), label and perhaps class, its name, of the same

Several labels of a vector are labels (N, M), with -1 where one has fewer, or lists in the column label.
Arrays are mapped, not read: a set may be larger than memory. The columns of a .parquet are read into memory. Vectors
are of any floating-point type, and leave as float32.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.labels import check_inside, of_file, of_sample
from partial_fc.data.npy import map_npz, read_npy
from partial_fc.data.recordio import MAX_CLASSES
from partial_fc.data.sample import BadRecord, Sample, Source
from partial_fc.data.sets.parquet import column_of, label_rows, open_parquet

SUFFIXES = (".npz", ".npy", ".parquet")
BLOCK = 8192  # vectors checked at once


class Vectors(Source):
    """The vectors of a file. num_classes: by default the number of class names, or else the largest label + 1.
    labelled: False: labels need not be there and are not read; all are 0. Raises ValueError for another layout,
    LabelOutOfRange, with the row, for a label that is not in [0, num_classes)."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        num_classes: int | None = None,
        num_labels: int = 1,
        *,
        labelled: bool = True,
    ):
        self.path, self.num_labels, self.labelled = Path(path), num_labels, labelled
        if not self.path.exists():
            raise ValueError(f"{self.path} not found; expected vectors: an .npz, .npy or .parquet")
        if self.path.suffix not in _READ:
            raise ValueError(f"{self.path}: unknown file type; expected vectors: an .npz, .npy or .parquet")
        self.row_ND, label_N, self._names, self._key_N = _READ[self.path.suffix](self.path, labelled)
        if self.row_ND.ndim != 2 or self.row_ND.dtype.kind != "f" or 0 in self.row_ND.shape:
            kind, shape = self.row_ND.dtype, self.row_ND.shape
            raise ValueError(f"{self.path}: embeddings are {kind} {shape}; expected floating-point numbers (N, D)")
        if label_N is None:
            label_N = np.zeros(len(self.row_ND), np.int64)
        fits = label_N.shape[:1] == self.row_ND.shape[:1] and label_N.ndim <= 2 and label_N.size
        if not fits or label_N.dtype.kind not in "iu":
            raise ValueError(
                f"{self.path}: labels are {label_N.dtype} {label_N.shape}; expected a whole number for each of "
                f"{len(self.row_ND)} embeddings"
            )
        self._label_N = of_file(label_N, self)  # with several labels (N, K)
        self.num_classes = num_classes or max(len(self._names or ()), int(self._label_N.max()) + 1)
        check_inside(self._label_N, self)

    @property
    def width(self) -> int:
        return self.row_ND.shape[1]

    def __len__(self) -> int:
        return len(self.row_ND)

    def read(self, index: int) -> Sample:
        row_1D = np.asarray(self.row_ND[index : index + 1], np.float32)
        if not usable(row_1D)[0]:
            finite = np.isfinite(row_1D).all()
            raise BadRecord(f"{self.where(index)}: {'only zeros' if finite else 'NaN or Inf'}; expected a vector")
        label, more = of_sample(self._label_N[index], self, index)
        return Sample(row_1D[0], label, index, more)

    def read_batch(self, index_B: NDArray[np.int64]) -> tuple[NDArray, NDArray[np.int64], NDArray[np.int64]] | None:
        row_BD = self.row_ND[index_B].astype(np.float32, copy=False)
        return (row_BD, self._label_N[index_B], index_B) if usable(row_BD).all() else None

    def unusable(self, firsts: Iterable[int]) -> NDArray[np.int64]:
        """Returns the rows without a direction in the blocks of BLOCK rows that begin at these."""
        found = [np.empty(0, np.int64)]
        for first in firsts:
            row_BD = np.asarray(self.row_ND[first : first + BLOCK], np.float32)
            found.append(first + np.flatnonzero(~usable(row_BD)))
        return np.concatenate(found)

    def where(self, index: int) -> str:
        key = self.key(index)
        return f"{self.path}, row {index}{'' if key == str(index) else f' ({key})'}"

    def key(self, index: int) -> str:
        """Returns the key that the table has for it, or its row."""
        key_N = self._key_N
        return str(index if key_N is None or key_N.shape != (len(self),) else key_N[index])

    def labels(self) -> NDArray[np.int64]:
        return self._label_N

    def class_names(self) -> list[str] | None:
        return self._names


def holds_vectors(path: Path) -> bool:
    """Tells files of vectors by their ending; a .parquet by its columns."""
    if path.suffix != ".parquet" or not path.is_file():
        return path.suffix in (".npz", ".npy")
    return "embedding" in open_parquet(path).schema_arrow.names


def has_labels(path: Path) -> bool:
    if path.suffix == ".parquet":
        return "label" in open_parquet(path).schema_arrow.names
    return "labels" in map_npz(path) if path.suffix == ".npz" else path.with_suffix(".labels.npy").exists()


def usable(row_ND: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Tells which vectors have a direction: all numbers finite, not all zero."""
    square_N = np.einsum("nd,nd->n", row_ND, row_ND, dtype=np.float64)
    return np.isfinite(square_N) & (square_N > 0)


_Read = tuple[NDArray[Any], NDArray[Any] | None, list[str] | None, NDArray[Any] | None]  # ..., class names, keys


def _read_npz(path: Path, labelled: bool) -> _Read:
    arrays = map_npz(path)
    missing = [name for name in ("embeddings", "labels")[: 1 + labelled] if name not in arrays]
    if missing:
        raise ValueError(f"{path} has no array {' and no '.join(missing)}; it has {', '.join(arrays) or 'none'}")
    if not labelled:
        return arrays["embeddings"], None, None, arrays.get("keys")
    names = [str(name) for name in arrays["class_names"]] if "class_names" in arrays else None
    return arrays["embeddings"], arrays["labels"], names, arrays.get("keys")


def _read_npy(path: Path, labelled: bool) -> _Read:
    if not labelled:
        return read_npy(path), None, None, None
    beside = path.with_suffix(".labels.npy")
    if not beside.exists():
        raise ValueError(f"{path}: its labels are not there; expected {beside}, a whole number for each vector")
    return read_npy(path), read_npy(beside), None, None


def _read_parquet(path: Path, labelled: bool) -> _Read:
    file = open_parquet(path)
    for name in ("embedding", "label")[: 1 + labelled]:
        column_of(path, file, (name,))
    row_ND = np.empty((0, 0), np.float32)
    first = 0
    try:
        for batch in file.iter_batches(columns=["embedding"]):
            row_BD = batch.column(0).flatten().to_numpy(zero_copy_only=False).reshape(len(batch), -1)
            row_ND = row_ND if first else np.empty((file.metadata.num_rows, row_BD.shape[1]), row_BD.dtype)
            row_ND[first : first + len(batch)] = row_BD
            first += len(batch)
    except (OSError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{path}: {error}; expected columns embedding, lists of D numbers, and label") from error
    if not labelled:
        return row_ND, None, None, None
    label_N = label_rows(path, file.read(columns=["label"]).column(0))
    if label_N.ndim > 1 or "class" not in file.schema_arrow.names:
        return row_ND, label_N, None, None
    names = dict(zip(label_N.tolist(), map(str, file.read(columns=["class"]).column(0).to_pylist()), strict=True))
    number = max(names) + 1
    known = [names.get(label, f"class {label}") for label in range(number)] if 0 < number <= MAX_CLASSES else None
    return row_ND, label_N, known, None


_READ = {".npz": _read_npz, ".npy": _read_npy, ".parquet": _read_parquet}
