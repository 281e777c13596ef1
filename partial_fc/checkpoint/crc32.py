"""CRC-32 of tensors in memory: the numbers that zlib makes, by ISA-L."""

import torch
from isal import isal_zlib
from torch import Tensor

_BLOCK = 1 << 22  # bytes: a copy of them is fast, and most are in the cache still when their CRC is made


def crc32(t: Tensor, before: int = 0) -> int:
    """Of the bytes of a tensor on the CPU, row by row, as they follow those of which `before` is the CRC."""
    return isal_zlib.crc32(as_bytes(t.contiguous()).numpy(), before) if t.nbytes else before


def copy(source_N: Tensor, target_N: Tensor, before: int = 0) -> int:
    """Copies bytes, uint8 (N,) both, without gaps; returns their CRC, as they follow those of `before`."""
    for source, target in zip(source_N.split(_BLOCK), target_N.split(_BLOCK), strict=True):
        target.copy_(source)
        before = crc32(target, before)
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
