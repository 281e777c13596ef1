"""Reader of .npy and .npz files of numbers and names, without pickle."""

import struct
import tokenize
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from partial_fc.file_kind import it_is
from partial_fc.files import check_regular

# Exceptions of NumPy for damaged headers (TypeError: an absurd dtype, or an .npy in place of an .npz), and of zipfile
# (RuntimeError: encrypted).
_DAMAGED = (
    *(EOFError, SyntaxError, TypeError, OverflowError, MemoryError, RecursionError, RuntimeError, KeyError),
    *(ValueError, tokenize.TokenError, zipfile.BadZipFile, struct.error),
)
Read = TypeVar("Read")


def read_npy(path: Path) -> NDArray[Any]:
    """Maps an array of numbers, bools or texts. Raises ValueError, with the file's name, for anything else."""
    return _read(path, lambda: _numbers(np.load(path, mmap_mode="r", allow_pickle=False)))


def read_weights(path: Path, num_records: int) -> NDArray[Any]:
    """Maps a weight for each record. Raises ValueError, with the file's name, for another number of them, and with the
    number of the first record for weights that are negative or not finite."""
    weight_N = read_npy(path)
    if weight_N.shape != (num_records,) or weight_N.dtype.kind != "f":
        raise ValueError(
            f"{path} has {weight_N.dtype} {weight_N.shape}; expected floating numbers, ({num_records},): one for each "
            "record, in the order of the data"
        )
    for first in range(0, num_records, 1 << 20):
        part = weight_N[first : first + (1 << 20)]
        bad = np.flatnonzero(~(np.isfinite(part) & (part >= 0)))
        if len(bad):
            raise ValueError(
                f"{path}: the weight of record {first + bad[0]} is {part[bad[0]]}; expected finite numbers, 0 or more"
            )
    return weight_N


def map_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Maps a numpy.savez file's arrays, by name, as `read_npy` does; the file's checksums are not compared. Raises
    ValueError also if compressed."""

    def read() -> dict[str, NDArray[Any]]:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            parts = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if any(info.compress_type != zipfile.ZIP_STORED for info in parts.values()):
                raise ValueError("it is compressed; expected what numpy.savez and `partial-fc embed` write")
            return {name: _numbers(_map_part(path, file, info)) for name, info in parts.items()}

    return _read(path, read)


def _map_part(path: Path, file: IO[bytes], info: zipfile.ZipInfo) -> NDArray[Any]:
    file.seek(max(0, info.header_offset))
    signature, *lengths = struct.unpack("<4s22xHH", file.read(30))  # of the name and of extra fields, which follow
    if signature != b"PK\x03\x04":
        raise ValueError(f"{info.filename} is not where the directory says")
    file.seek(sum(lengths), 1)
    end = file.tell() + info.file_size
    header = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, dtype = header(file)
    array = np.memmap(path, dtype, "r", file.tell(), shape, "F" if is_fortran else "C")
    if file.tell() + array.nbytes > end:
        raise ValueError(f"{info.filename} says {dtype} {shape}, more than is there")
    return array


def _read(path: Path, read: Callable[[], Read]) -> Read:
    check_regular(path)
    try:
        return read()
    except _DAMAGED as error:
        raise ValueError(f"{path} is no {path.suffix} file of numbers, or damaged: {error}{it_is(path)}") from None


def _numbers(found: Any) -> NDArray[Any]:
    array = np.asarray(found)
    if array.dtype.kind not in "biufU":
        raise ValueError(f"its dtype is {array.dtype}")
    return array
