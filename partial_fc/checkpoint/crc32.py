"""CRC-32 of tensors in memory, the numbers that zlib makes: by the C++ of the head's kernel, where a copy makes it in
the same pass; where that is not compiled and cannot be, by zlib."""

import ctypes
import functools
import logging
import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 1 << 18  # bytes that are still in the cache when zlib has read them
_log = logging.getLogger("partial_fc")


def crc32(t: Tensor, before: int = 0) -> int:
    """Of the bytes of a tensor on the CPU, row by row, as they follow those of which `before` is the CRC."""
    t = t.contiguous()
    return _functions().update(before, t.data_ptr(), t.nbytes) if t.nbytes else before


def copy(source_N: Tensor, target_N: Tensor, before: int = 0) -> int:
    """Copies bytes, uint8 (N,) both, without gaps; returns their CRC, as they follow those of `before`."""
    assert source_N.shape == target_N.shape
    assert source_N.is_contiguous()
    assert target_N.is_contiguous()
    return _functions().copy(before, target_N.data_ptr(), source_N.data_ptr(), len(source_N))


def copied(t: Tensor) -> tuple[Tensor, int]:
    """(the tensor in memory of its own, on the CPU; its CRC)."""
    if t.device.type != "cpu" or not t.is_contiguous():
        own = t.contiguous().cpu()
        return own, crc32(own)
    own = torch.empty_like(t)
    return own, copy(as_bytes(t), as_bytes(own))


def as_bytes(t: Tensor) -> Tensor:
    """A contiguous tensor's bytes: a view, uint8 (N,)."""
    return t.reshape(-1).view(torch.uint8)


class Functions(NamedTuple):
    """Both take the CRC of the bytes before and give that of all."""

    # (before, address, number of bytes)
    update: Callable[[int, int, int], int]
    # (before, address that is copied to, address that is copied from, number of bytes)
    copy: Callable[[int, int, int, int], int]


@functools.cache
def _functions() -> Functions:
    from partial_fc.head.kernels.cpu import load

    try:
        compiled = load("portable")
    except (ValueError, RuntimeError, OSError) as error:
        _log.info(f"checksums of commits are made by zlib, which is slower than the C++ kernel: {error}")
        return BY_ZLIB
    width = compiled.head_crc32_width()
    return by_width(compiled, width) if width > 8 else BY_ZLIB


def by_width(compiled: ctypes.CDLL, width: int) -> Functions:
    """Those of the C++ kernel's library, which folds so many bits at a time."""
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    update, copy = compiled.head_crc32, compiled.head_copy_crc32
    update.restype = copy.restype = ctypes.c_uint32
    update.argtypes = [ctypes.c_uint32, pointer, number, ctypes.c_int32]
    copy.argtypes = [ctypes.c_uint32, pointer, pointer, number, ctypes.c_int32]
    return Functions(
        lambda before, address, num_bytes: update(before, address, num_bytes, width),
        lambda before, to, source, num_bytes: copy(before, to, source, num_bytes, width),
    )


def _zlib_update(before: int, address: int, num_bytes: int) -> int:
    return zlib.crc32((ctypes.c_char * num_bytes).from_address(address), before)


def _zlib_copy(before: int, to: int, source: int, num_bytes: int) -> int:
    for at in range(0, num_bytes, _BLOCK):
        size = min(_BLOCK, num_bytes - at)
        ctypes.memmove(to + at, source + at, size)
        before = _zlib_update(before, to + at, size)
    return before


BY_ZLIB = Functions(_zlib_update, _zlib_copy)
