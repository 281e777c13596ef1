"""Caffe2's minidb as a store of records: their places are listed at the start, the values stay on the disk."""

import os
import weakref
from pathlib import Path

from partial_fc.data.databases import minidb_file
from partial_fc.data.sample import BadRecord
from partial_fc.files import regular


class MinidbStore:
    """Raises ValueError for what is no minidb file, or cut short."""

    kind = "minidb"

    def __init__(self, path: Path):
        self.path = path
        self._edges = minidb_file.offsets(path)
        self._file = regular(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._edges) - 1

    def item(self, index: int) -> tuple[bytes, bytes]:
        """(key, value) of the index-th record, as they stand in the file. Raises BadRecord where the disk fails."""
        start, end = map(int, self._edges[index : index + 2])
        content = os.pread(self._file, end - start, start)
        if len(content) != end - start:
            raise BadRecord(f"{self.path}, byte {start}: the file ends before this record does; it was cut meanwhile")
        return minidb_file.pair(content)
