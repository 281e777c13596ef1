"""The list of a database's keys in order: a key's own bytes and 8 more each, in every process."""

import zipfile
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partial_fc.files import replacing


@dataclass(frozen=True)
class KeyList:
    """keys: concatenated. end_N: the end of each of the N keys."""

    keys: bytes
    end_N: NDArray[np.int64]

    @classmethod
    def collect(cls, keys: Iterable[bytes]) -> "KeyList":
        joined, ends = bytearray(), array("q")
        for key in keys:
            joined += key
            ends.append(len(joined))
        return cls(bytes(joined), np.array(ends, np.int64))

    def __len__(self) -> int:
        return len(self.end_N)

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return self.keys[self.end_N[index - 1] if index else 0 : self.end_N[index]]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez(file, keys=np.frombuffer(self.keys, np.uint8), end_N=self.end_N)

    @classmethod
    def load(cls, path: Path) -> "KeyList | None":
        """Reads a saved list; None if there is no complete one."""
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls(file["keys"].tobytes(), file["end_N"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
