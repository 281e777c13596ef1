"""An image database as a source: records in key order, each a Datum or TensorProtos."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from partial_fc.data.databases.records import read_record
from partial_fc.data.sample import BadRecord, LabelOutOfRange, Sample


class Store(Protocol):
    """Records 0 to len - 1 in the database's own order. Every method may be called from several threads at once."""

    kind: str
    path: Path

    def __len__(self) -> int: ...

    def item(self, index: int) -> tuple[bytes, bytes]:
        """(key, value). Raises BadRecord where this one record is damaged, ValueError where the database is."""
        ...

    def close(self) -> object: ...


class DatabaseSource:
    """num_classes: what the caller says; no label is read at the start. Raises ValueError for an empty database."""

    def __init__(self, store: Store, num_classes: int) -> None:
        if len(store) == 0:
            raise ValueError(f"{store.path} is an empty {store.kind}: it has no record")
        self._store = store
        self._num_classes = num_classes
        self.kind, self.close = store.kind, store.close

    @property
    def num_classes(self) -> int:
        return self._num_classes

    def __len__(self) -> int:
        return len(self._store)

    def read(self, index: int) -> Sample:
        """Raises BadRecord, and LabelOutOfRange where the label is not below num_classes; both name the key."""
        key, value = self._store.item(index)
        try:
            image, label = read_record(value)
        except BadRecord as error:
            raise BadRecord(f"{self._named(key)}: {error}") from None
        if label >= self._num_classes:
            raise LabelOutOfRange(
                f"{self._named(key)}: label {label}; expected 0 to {self._num_classes - 1}: is --num_labels "
                f"{self._num_classes} that of another set?",
                label,
            )
        return Sample(image, label, index)

    def item(self, index: int) -> tuple[bytes, bytes]:
        """(key, value), as they are in the database. Raises BadRecord."""
        return self._store.item(index)

    def where(self, index: int) -> str:
        try:
            return self._named(self.item(index)[0])
        except BadRecord:
            return f"{self._store.path}, record {index} (counted from 0)"

    def _named(self, key: bytes) -> str:
        return f"{self._store.path}, key {key.decode('utf-8', 'backslashreplace')}"

    def will_need(self, indices: Sequence[int]) -> None:
        """Nothing: neither library takes hints."""

    def labels(self) -> None:
        """None: they lie within the records, which would all have to be read."""

    def class_names(self) -> None:
        """None: they are no more than numbers."""
