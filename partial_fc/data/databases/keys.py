"""A sparse list of a database's keys in order: every n-th one, so that memory is bounded."""

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partial_fc.files import replacing

MOST = 2**21  # keys kept; 20 million of 30 bytes take 50 MB


@dataclass(frozen=True)
class KeyList:
    """Every n-th key. keys: concatenated. end_K: the end of each of the K keys. stride: records from one kept key to
    the next. num_records: of the database."""

    keys: bytes
    end_K: NDArray[np.int64]
    stride: int
    num_records: int

    @classmethod
    def collect(cls, keys: Iterable[bytes], most: int | None = None) -> "KeyList":
        most = most or MOST
        kept: list[bytes] = []
        stride, num_records = 1, 0
        for key in keys:
            if num_records % stride == 0:
                if len(kept) == most:
                    del kept[1::2]
                    stride *= 2
                if num_records % stride == 0:
                    kept.append(key)
            num_records += 1
        end_K = np.cumsum(np.fromiter(map(len, kept), np.int64, len(kept)))
        return cls(b"".join(kept), end_K, stride, num_records)

    def before(self, index: int) -> tuple[bytes, int]:
        """Returns (the last kept key up to record `index`, how many records before it that key is)."""
        if not 0 <= index < self.num_records:
            raise IndexError(f"record {index} of {self.num_records}")
        kept, steps = divmod(index, self.stride)
        return self.keys[self.end_K[kept - 1] if kept else 0 : self.end_K[kept]], steps

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("wb") as file:
            numbers = np.array([self.stride, self.num_records])
            np.savez(file, keys=np.frombuffer(self.keys, np.uint8), end_K=self.end_K, numbers=numbers)

    @classmethod
    def load(cls, path: Path) -> "KeyList | None":
        """Reads a saved list; None if there is no complete one."""
        try:
            with np.load(path, allow_pickle=False) as file:
                stride, num_records = map(int, file["numbers"])
                keys = cls(file["keys"].tobytes(), file["end_K"], stride, num_records)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        kept = -(-num_records // stride)
        return keys if len(keys.end_K) == kept and (not kept or keys.end_K[-1] == len(keys.keys)) else None
