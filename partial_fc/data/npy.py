"""Reads .npy files of numbers, also of strangers: no code, no more memory than the file has bytes, nothing evaluated.

    "\\x93NUMPY", version (2 bytes), the header's length (u16; u32 from version 2 on), the header: a Python dict,
    {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }, then the numbers

(https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html)
"""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.files import read_bytes

_MAGIC = b"\x93NUMPY"
_MOST_BYTES = 64 << 30
_MOST_HEADER = 4096
# As numpy writes it, whatever the order: a dtype of plain numbers, a flag, at most 32 sizes.
_FIELDS = {
    "descr": re.compile(rb"'descr': '([<>|=]?[biuf]\d{1,2})'"),
    "fortran_order": re.compile(rb"'fortran_order': (True|False)"),
    "shape": re.compile(rb"'shape': \(((?:\d{1,18}, ?){0,31}(?:\d{1,18})?)\)"),
}


def read_npy(path: Path) -> NDArray[Any]:
    """The array of integers, floats or bools in a file. Raises ValueError, which names the file, for one that is
    damaged or of anything else, OSError as open does."""
    content = read_bytes(path, _MOST_BYTES)
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
