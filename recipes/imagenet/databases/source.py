"""An image database as a source: records in key order, each a Datum or TensorProtos."""

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from partial_fc.data.image_folder import image_names
from partial_fc.data.labels import of_file
from partial_fc.data.sample import BadRecord, LabelOutOfRange, Sample, Source
from partial_fc.file_kind import LMDB, TEXT, it_is, kind_of, kind_of_file

from .lmdb_store import LmdbStore
from .records import read_record

Kind = Literal["lmdb", "leveldb"]


class DatabaseSource(Source):
    """An image database's records as samples. num_classes: None: reads every record at the start, for its label;
    otherwise none. Raises ValueError for an empty database, and for one of pictures or pickles without labels."""

    def __init__(self, store: LmdbStore, num_classes: int | None, num_labels: int = 1) -> None:
        if len(store) == 0:
            raise ValueError(f"{store.path} is an empty {store.kind}: it has no record")
        self._store, self.num_labels = store, num_labels
        self.kind = store.kind
        _check_kind(store)
        self.num_classes, self._label_N, self._damage = num_classes or 2**31, None, ""
        if num_classes is None:
            label_N = np.fromiter(map(self._label, range(len(store))), np.int64, len(store))
            self.num_classes = max(1, int(label_N.max()) + 1)
            self._label_N = of_file(np.maximum(label_N, 0), self)

    def __len__(self) -> int:
        return len(self._store)

    def read(self, index: int) -> Sample:
        """Reads a sample. Raises BadRecord, and LabelOutOfRange for a label above num_classes; both name the key."""
        key, value = self._store.item(index)
        try:
            image, label = read_record(value)
        except BadRecord as error:
            raise BadRecord(f"{self._named(key)}: {error}") from None
        if label >= self.num_classes:
            raise LabelOutOfRange(
                f"{self._named(key)}: label {label}; expected 0 to {self.num_classes - 1} (--num_labels)", label
            )
        return Sample(image, label, index)

    def item(self, index: int) -> tuple[bytes, bytes]:
        """Returns the stored (key, value)."""
        return self._store.item(index)

    def labels(self) -> Any:
        """Returns the labels as `Source.labels` does; None if they were not read at the start. Raises BadRecord if one
        of the records is damaged."""
        if self._damage:
            raise BadRecord(self._damage)
        return self._label_N

    def _label(self, index: int) -> int:
        try:
            return self.read(index).label
        except BadRecord as error:
            self._damage = self._damage or str(error)
            return -1

    def where(self, index: int) -> str:
        return self._named(self.item(index)[0])

    def _named(self, key: bytes) -> str:
        return f"{self._store.path}, key {key.decode('utf-8', 'backslashreplace')}"


def _check_kind(store: LmdbStore) -> None:
    """Raises ValueError if the first record is a picture or a pickle itself."""
    key = value = b""
    try:
        key, value = store.item(0)
        read_record(value)
    except BadRecord:
        if kind := kind_of(value).removeprefix("empty").removeprefix(TEXT):
            raise ValueError(
                f"{store.path} is an {store.kind} of another kind: the record of key {key[:40]!r} is {kind}, no "
                "Datum or TensorProtos, with a label. Labels of pictures by key stand in another file, and pickles are "
                "not read, since they can run code: write the images as files, with a list `path label` (docs/data.md)"
            ) from None


# ---- opening one


def open_database(
    path: str | os.PathLike[str], db_type: Kind | None, num_classes: int | None, *, num_labels: int = 1
) -> DatabaseSource:
    """Opens the database at a path. num_classes, num_labels: as DatabaseSource. db_type: the expected kind; None: any.
    Raises ValueError for what is no database."""
    folder = Path(path)
    kind = _kind(folder)
    if db_type not in (None, kind):
        raise ValueError(f"{folder} is a {_NAMES[kind]}, --db_type says {db_type}; give --db_type {kind}")
    if kind == "lmdb":
        return DatabaseSource(LmdbStore(folder), num_classes, num_labels)
    from .leveldb import as_lmdb

    return DatabaseSource(LmdbStore(as_lmdb(folder), folder), num_classes, num_labels)


_NAMES = {"lmdb": "LMDB", "leveldb": "LevelDB"}


def _kind(path: Path) -> Kind:
    expected = "expected an LMDB (a folder with data.mdb) or a LevelDB (one with CURRENT)"
    if not path.exists():
        raise ValueError(f"{path} not found; {expected}")
    if (path / "data.mdb").is_file():
        return "lmdb"
    if (path / "CURRENT").is_file():
        return "leveldb"
    if path.is_file():
        if path.suffix == ".rec":
            raise ValueError(f"{path} holds MXNet's records; {expected}: `partial-fc data lmdb {path} OUT` makes one")
        if kind_of_file(path) == LMDB:
            return "lmdb"
        raise ValueError(f"{path} is no image database{it_is(path)}; {expected}")
    if any(path.glob("MANIFEST-*")) or any(path.glob("*.ldb")):
        raise ValueError(f"{path} has LevelDB's files but no CURRENT: the copy is incomplete")
    entries = sorted(entry for entry in path.iterdir() if entry.is_dir())
    if image_names(path) or any(image_names(entry) for entry in entries[:10]) or (path / "train.rec").exists():
        raise ValueError(
            f"{path} is a folder of images or records; {expected}: `partial-fc data lmdb {path} OUT` makes one. "
            "(Recipe face reads it as it is, --rec.)"
        )
    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
    raise ValueError(f"{path} is a folder with {found}; {expected}")
