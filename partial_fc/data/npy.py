"""Reader of .npy and .npz files of numbers and names, without pickle."""

import tokenize
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from partial_fc.files import check_regular

# Exceptions of NumPy for damaged headers (TypeError: an absurd dtype, or an .npy in place of an .npz), and of zipfile
# (RuntimeError: encrypted).
_DAMAGED = (
    *(EOFError, SyntaxError, TypeError, OverflowError, MemoryError, RecursionError, RuntimeError, KeyError),
    *(ValueError, tokenize.TokenError, zipfile.BadZipFile),
)
Read = TypeVar("Read")


def read_npy(path: Path) -> NDArray[Any]:
    """Maps an array of numbers, bools or texts. Raises ValueError, with the file's name, for anything else."""
    return _read(path, lambda: _numbers(np.load(path, mmap_mode="r", allow_pickle=False)))


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Reads a numpy.savez file's arrays, by name. Raises as `read_npy`, also if compressed: that can expand a
    thousandfold."""

    def read() -> dict[str, NDArray[Any]]:
        with np.load(path, allow_pickle=False) as file:
            if any(part.compress_type != zipfile.ZIP_STORED for part in file.zip.infolist()):
                raise ValueError("it is compressed; expected what numpy.savez and `partial-fc embed` write")
            return {name: _numbers(file[name]) for name in file}

    return _read(path, read)


def _read(path: Path, read: Callable[[], Read]) -> Read:
    check_regular(path)
    try:
        return read()
    except _DAMAGED as error:
        raise ValueError(f"{path} is no {path.suffix} file of numbers, or damaged: {error}") from None


def _numbers(found: Any) -> NDArray[Any]:
    array = np.asarray(found)
    if array.dtype.kind not in "biufU":
        raise ValueError(f"its dtype is {array.dtype}")
    return array
