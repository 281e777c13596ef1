"""Reader of .npy and .npz files of numbers and names, without pickle."""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from partial_fc.file_kind import it_is
from partial_fc.files import check_regular


def read_npy(path: Path) -> NDArray[Any]:
    """Maps an array of numbers, bools or texts. Raises ValueError, with the file's name, for anything else."""
    with _named(path):
        return _numbers(npy.open_memmap(path, mode="r"))


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
    with _named(path), path.open("rb") as file, zipfile.ZipFile(file) as archive:
        return {info.filename.removesuffix(".npy"): _map_part(archive, file, info) for info in archive.infolist()}


def _map_part(archive: zipfile.ZipFile, file: IO[bytes], info: zipfile.ZipInfo) -> NDArray[Any]:
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed; expected what numpy.savez and `partial-fc embed` write")
    archive.open(info).close()  # reads the file up to the start of this part
    end = file.tell() + info.file_size
    header = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, dtype = header(file)
    start = file.tell()
    array = _numbers(np.memmap(file, dtype, "r", start, shape, "F" if is_fortran else "C"))
    if start + array.nbytes > end:
        raise ValueError(f"{info.filename} says {dtype} {shape}, more than is there")
    return array


@contextmanager
def _named(path: Path) -> Iterator[None]:
    check_regular(path)
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # numpy's and zipfile's for damaged files are nearly any
        raise ValueError(f"{path} is no {path.suffix} file of numbers, or damaged: {error}{it_is(path)}") from None


def _numbers(mapped: NDArray[Any]) -> NDArray[Any]:
    array = np.asarray(mapped)
    if array.dtype.kind not in "biufU":
        raise ValueError(f"its dtype is {array.dtype}")
    return array
