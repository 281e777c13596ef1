"""CRC-32 of tensors in memory, the numbers that zlib makes: by the C++ of the head's kernel, in the time of the copy
beside it; where that is not compiled and cannot be, by zlib."""

import ctypes
import functools
import logging
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK = 1 << 18  # bytes that are still in the cache when they have been copied
_log = logging.getLogger("partial_fc")


def crc32(t: Tensor, before: int = 0) -> int:
    """Of the bytes of a tensor on the CPU, row by row, as they follow those of which `before` is the CRC."""
    t = t.contiguous()
    return _update()(before, t.data_ptr(), t.nbytes) if t.nbytes else before


def copy(source_N: Tensor, target_N: Tensor, before: int = 0) -> int:
    """Copies bytes, uint8 (N,) both; returns their CRC, as they follow those of `before`."""
    for source_K, target_K in zip(source_N.split(_BLOCK), target_N.split(_BLOCK), strict=True):
        before = crc32(target_K.copy_(source_K), before)
    return before


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


_Update = Callable[[int, int, int], int]  # (CRC of the bytes before, address, number of bytes) -> CRC


@functools.cache
def _update() -> _Update:
    from partial_fc.head.kernels.cpu import load

    try:
        compiled = load("portable")
    except (ValueError, RuntimeError, OSError) as error:
        _log.info(f"checksums of commits are made by zlib, which is slower than the C++ kernel: {error}")
        return _by_zlib
    width = compiled.head_crc32_width()
    return by_width(compiled, width) if width > 8 else _by_zlib


def by_width(compiled: ctypes.CDLL, width: int) -> _Update:
    """That of the C++ kernel's library, which folds so many bits at a time."""
    compiled.head_crc32.restype = ctypes.c_uint32
    compiled.head_crc32.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32]
    return lambda before, address, num_bytes: compiled.head_crc32(before, address, num_bytes, width)


def _by_zlib(before: int, address: int, num_bytes: int) -> int:
    return zlib.crc32((ctypes.c_char * num_bytes).from_address(address), before)
