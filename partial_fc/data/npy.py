"""Reads .npy and .npz files of numbers and names, also of strangers: nothing is evaluated, no size believed.

    "\\x93NUMPY", version (2 bytes), the header's length (u16; u32 from version 2 on), the header: a Python dict,
    {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }, then the numbers

(https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html)
"""

import math
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.files import read_bytes, regular

_MAGIC = b"\x93NUMPY"
_MOST_BYTES = 64 << 30
_MOST_HEADER = 4096
# As numpy writes it, whatever the order: a dtype of plain numbers, a flag, at most 32 sizes.
_FIELDS = {
    "descr": re.compile(rb"'descr': '([<>|=]?(?:[biuf]\d{1,2}|U\d{1,6}))'"),
    "fortran_order": re.compile(rb"'fortran_order': (True|False)"),
    "shape": re.compile(rb"'shape': \(((?:\d{1,18}, ?){0,31}(?:\d{1,18})?)\)"),
}


def read_npy(path: Path) -> NDArray[Any]:
    """The array of numbers, bools or texts in a file. Raises ValueError, which names the file, for one that is damaged
    or of anything else, OSError as open does."""
    return _array(path, read_bytes(path, _MOST_BYTES))


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file of numpy.savez, by name. Raises as `read_npy`, also for compressed ones, which can be a
    thousand times the file's size."""
    size = path.stat().st_size
    try:
        with open(path, "rb", opener=regular) as file, zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise ValueError(f"{path} is compressed; expected what numpy.savez and `partial-fc embed` write")
            # (What is not compressed has two sizes, too: one counts, the other is read.)
            if sum(max(part.file_size, part.compress_size) for part in parts) > size:
                raise ValueError(f"{path}: its parts are larger than the file")
            return {
                part.filename.removesuffix(".npy"): _array(f"{path}, {part.filename}", archive.read(part))
                for part in parts
            }
    # What zipfile raises for damaged ones; RuntimeError: encrypted.
    except (zipfile.BadZipFile, EOFError, RuntimeError, struct.error) as error:
        raise ValueError(f"{path} is no .npz file, or damaged: {error}") from None


def _array(path: object, content: bytes) -> NDArray[Any]:
    expected = f"{path} is no .npy file of numbers"
    if not content.startswith(_MAGIC) or len(content) < 12:
        raise ValueError(f"{expected}: {len(content)} bytes, starting {content[:8].hex(' ')}")
    length_bytes = 2 if content[6] == 1 else 4
    begin = 8 + length_bytes
    end = begin + int.from_bytes(content[8:begin], "little")
    header = content[begin:end]
    if end > len(content) or len(header) > _MOST_HEADER:
        raise ValueError(f"{expected}: a header of {end - begin} bytes in a file of {len(content)}")
    found = {name: field.findall(header) for name, field in _FIELDS.items()}
    if any(len(values) != 1 for values in found.values()):
        raise ValueError(f"{expected}: its header says {header.strip()[:100].decode('latin-1')!r}")
    try:
        dtype = np.dtype(found["descr"][0].decode())
    except TypeError as error:
        raise ValueError(f"{expected}: {error}") from None
    shape = tuple(int(size) for size in found["shape"][0].split(b",") if size.strip())
    count = math.prod(shape)  # Python's integers: a product of absurd sizes is too large, not a small number again
    if count * dtype.itemsize != len(content) - end:
        raise ValueError(
            f"{path}: its header says {dtype} {shape}, {count * dtype.itemsize} bytes; {len(content) - end} follow"
        )
    try:
        array = np.frombuffer(content, dtype, count, end)
        return array.reshape(shape, order="F" if found["fortran_order"][0] == b"True" else "C")
    except ValueError as error:  # nothing, of more dimensions or sizes than NumPy has
        raise ValueError(f"{expected}: {dtype} {shape}: {error}") from None
