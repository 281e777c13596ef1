"""Reader and writer of mxnet.nd.save files without MXNet, which is retired: lists of dense arrays, with or without
names.

    u64 0x112, u64 0, u64 number of arrays; then each:
        u32 magic (0xF993FAC9; 0xF993FACA under numpy semantics), i32 storage type (0 dense), i32 dimensions, i64 each,
        i32 device type, i32 device number, i32 dtype, the numbers; little-endian throughout, nothing aligned
    u64 number of names (0 or as many as arrays), each u64 length and bytes

(The order of fields is that of NDArray::Save in MXNet 1.9.1's src/ndarray/ndarray.cc.)
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from partial_fc.files import regular, replacing

_LIST, _DENSE = 0x112, 0
_MAGICS = (0xF993FAC9, 0xF993FACA)
# By MXNet's number; only dtypes that torch has.
_DTYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "<u1", 4: "<i4", 5: "<i1", 6: "<i8"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_MAX_DIMENSIONS = 32
_CPU = 1  # MXNet's device type


def read(path: Path) -> dict[str, Tensor]:
    """Reads the arrays by name, or by "0", "1", ... without names; mapped, so that values are read on use. Raises
    ValueError, with the offset, for anything else."""
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; expected a file of mxnet.nd.save")
    with open(path, "rb", opener=regular) as file:
        # Private: torch has no read-only tensors.
        content = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return _Reader(path, content).arrays()


def write(path: Path, arrays: Mapping[str, Tensor] | Sequence[Tensor], durable: bool = False) -> None:
    """Writes arrays by name (as MXNet's .params), or without names, byte for byte as mxnet.nd.save does. durable: see
    `replacing`. Raises ValueError for a dtype that MXNet lacks, and for a scalar."""
    names = list(arrays) if isinstance(arrays, Mapping) else []
    tensors = list(arrays.values()) if isinstance(arrays, Mapping) else list(arrays)
    with replacing(path, durable) as partial, partial.open("wb") as file:
        file.write(struct.pack("<QQQ", _LIST, 0, len(tensors)))
        for number, t in enumerate(tensors):
            file.writelines(_array_bytes(t, names[number] if names else f"array {number}"))
        file.write(struct.pack("<Q", len(names)))
        for name in names:
            encoded = name.encode()
            file.write(struct.pack("<Q", len(encoded)) + encoded)


def _array_bytes(t: Tensor, what: str) -> Iterator[bytes | memoryview]:
    t = t.detach().cpu().contiguous()
    code = None if t.dtype == torch.bfloat16 else _CODES.get(t.numpy().dtype)
    if code is None or not 1 <= t.dim() <= _MAX_DIMENSIONS or not t.numel():
        raise ValueError(
            f"{what} is {t.dtype} of shape {tuple(t.shape)}; a file of MXNet holds arrays of "
            f"{', '.join(dtype.name for dtype in _CODES)}, of 1 to {_MAX_DIMENSIONS} dimensions, none of them 0"
        )
    yield struct.pack(f"<Iii{t.dim()}q", _MAGICS[0], _DENSE, t.dim(), *t.shape)
    yield struct.pack("<iii", _CPU, 0, code)
    yield t.numpy().data


class _Reader:
    """A forward reader that never reads past the end of a file."""

    def __init__(self, path: object, content: mmap.mmap | bytearray):
        self._path, self._content, self._at = path, content, 0

    @property
    def _left(self) -> int:
        """Returns the bytes not read yet."""
        return len(self._content) - self._at

    def arrays(self) -> dict[str, Tensor]:
        magic, _, count = self._numbers("QQQ", "the head of a list of arrays")
        if magic != _LIST:
            raise self._bad(f"the file begins with {magic:#x}; expected {_LIST:#x}, a file of mxnet.nd.save")
        if count > len(self._content):
            raise self._bad(f"{count} arrays in a file of {len(self._content)} bytes")
        arrays = [self.array(i) for i in range(count)]
        (num_names,) = self._numbers("Q", "the number of names")
        if num_names not in (0, count):
            raise self._bad(f"{num_names} names for {count} arrays")
        names = [self._name() for _ in range(num_names)] or [str(i) for i in range(count)]
        if len(set(names)) < count:
            raise self._bad("two arrays have one name")
        if self._left:
            raise self._bad(f"{self._left} bytes are left over")
        return dict(zip(names, arrays, strict=True))

    def array(self, number: int) -> Tensor:
        what = f"array {number}"
        (magic,) = self._numbers("I", what)
        if magic not in _MAGICS:
            raise self._bad(f"{what} begins with {magic:#x}; expected {_MAGICS[0]:#x}, as MXNet 1.x writes it")
        storage, ndim = self._numbers("ii", what)
        if storage != _DENSE:
            raise self._bad(f"{what} is sparse (storage type {storage}); expected a dense one")
        if not 1 <= ndim <= _MAX_DIMENSIONS:
            raise self._bad(f"{what} has {ndim} dimensions; expected 1 to {_MAX_DIMENSIONS}")
        shape = self._numbers(f"{ndim}q", what)
        _, _, code = self._numbers("iii", what)
        if code not in _DTYPES:
            raise self._bad(f"{what} has dtype number {code}; expected one of {sorted(_DTYPES)}")
        dtype = np.dtype(_DTYPES[code])
        count = math.prod(shape)  # Python's integers: absurd sizes do not overflow
        num_bytes = count * dtype.itemsize
        if any(size < 1 for size in shape) or num_bytes > self._left:
            raise self._bad(f"{what} of shape {shape} needs {num_bytes} bytes; {self._left} are left")
        values = np.frombuffer(self._content, dtype, count, self._at).reshape(shape)
        self._at += num_bytes
        return torch.from_numpy(values if values.flags.aligned else values.copy())

    def _name(self) -> str:
        (length,) = self._numbers("Q", "the length of a name")
        if length > self._left:
            raise self._bad(f"a name of {length} bytes; {self._left} are left")
        self._at += length
        return self._content[self._at - length : self._at].decode("utf-8", "backslashreplace")

    def _numbers(self, kinds: str, what: str) -> tuple[int, ...]:
        size = struct.calcsize(f"<{kinds}")
        if size > self._left:
            raise self._bad(f"cut short in {what}")
        self._at += size
        return struct.unpack_from(f"<{kinds}", self._content, self._at - size)

    def _bad(self, message: str) -> ValueError:
        return ValueError(f"{self._path}, byte {self._at}: {message}")
