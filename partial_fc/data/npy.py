"""Reader of .npy and .npz files of numbers and names, without pickle; allocates no more than the file's size allows."""

import math
import os
import tokenize
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.files import regular

# Exceptions of NumPy for damaged headers (TypeError: an absurd dtype), and of zipfile (RuntimeError: encrypted).
_DAMAGED = (
    EOFError,
    SyntaxError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
    RuntimeError,
    tokenize.TokenError,
)


def read_npy(path: Path) -> NDArray[Any]:
    """Reads an array of numbers, bools or texts. Raises ValueError, with the file's name, for anything else."""
    with open(path, "rb", opener=regular) as file:
        return _array(path, file, os.fstat(file.fileno()).st_size)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Reads a numpy.savez file's arrays, by name. Raises as `read_npy`, also if compressed: that can expand a
    thousandfold."""
    try:
        with open(path, "rb", opener=regular) as file, zipfile.ZipFile(file) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError(f"{path} is compressed; expected what numpy.savez and `partial-fc embed` write")
            arrays, num_bytes = {}, os.fstat(file.fileno()).st_size
            for part in archive.infolist():
                with archive.open(part) as content:
                    arrays[part.filename.removesuffix(".npy")] = _array(f"{path}, {part.filename}", content, num_bytes)
            return arrays
    except (zipfile.BadZipFile, *_DAMAGED) as error:
        raise ValueError(f"{path} is no .npz file, or damaged: {error}") from None


def _array(path: object, file: IO[bytes], num_bytes: int) -> NDArray[Any]:
    """Reads one array; num_bytes, of the whole file, bounds its size."""
    begin, form = file.tell(), np.lib.format
    try:
        header = form.read_array_header_1_0 if form.read_magic(file) == (1, 0) else form.read_array_header_2_0
        shape, _, dtype = header(file)
        if math.prod(shape) * dtype.itemsize > num_bytes:
            raise ValueError(f"its header says {dtype} {shape}; the file has {num_bytes} bytes")
        file.seek(begin)
        array = form.read_array(file, allow_pickle=False)
    except (ValueError, *_DAMAGED) as error:
        raise ValueError(f"{path} is no .npy file of numbers: {error}") from None
    if array.dtype.kind not in "biufU":
        raise ValueError(f"{path} is no .npy file of numbers: {array.dtype}")
    return array
