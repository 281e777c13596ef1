"""CRC-32 of tensors in memory, equal to zlib's, computed by ISA-L."""

import torch
from isal import isal_zlib
from torch import Tensor

_BLOCK = 1 << 22  # bytes: fast to copy, and still in the cache when the CRC is computed


def crc32(t: Tensor, before: int = 0) -> int:
    """Returns the CRC of a CPU tensor's bytes, row by row, continuing the CRC `before`."""
    return isal_zlib.crc32(as_bytes(t.contiguous()).numpy(), before) if t.nbytes else before


def copy(source_N: Tensor, target_N: Tensor, before: int = 0) -> int:
    """Copies bytes, both uint8 (N,) and contiguous; returns their CRC, continuing the CRC `before`."""
    for source, target in zip(source_N.split(_BLOCK), target_N.split(_BLOCK), strict=True):
        target.copy_(source)
        before = crc32(target, before)
    return before


def copied(t: Tensor) -> tuple[Tensor, int]:
    """Returns (a copy of the tensor on the CPU, its CRC)."""
    if t.device.type != "cpu" or not t.is_contiguous():
        own = t.contiguous().cpu()
        return own, crc32(own)
    own = torch.empty_like(t)
    return own, copy(as_bytes(t), as_bytes(own))


def as_bytes(t: Tensor) -> Tensor:
    """Returns a contiguous tensor's bytes: a view, uint8 (N,)."""
    return t.reshape(-1).view(torch.uint8)
