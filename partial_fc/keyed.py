"""Pseudo-random functions of a key and a counter: nothing is drawn in sequence, nothing is kept.

Whatever must not depend on the number of ranks, on the order of calls or on a restart (the order of the
samples, the negative classes of a step, the first value of a class centre) is a function from here.

All arithmetic is on int64 tensors that hold 32-bit values, so a CPU and a GPU give the same integers.
The mixing constants are those of Chris Wellons' `lowbias32` (public domain, https://nullprogram.com/blog/2018/07/31/).
"""

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDS = 6


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every output bit depends on every input bit."""
    x = x & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def fold(*parts: int) -> int:
    """Integers of any size -> one 32-bit key; the order of the parts matters."""
    key = 0x9E3779B9
    for part in parts:
        while True:
            key = int(mix(torch.tensor(key ^ (part & _MASK), dtype=torch.int64) + 0x9E3779B9))
            part >>= 32
            if part in (0, -1):
                break
    return key


def permute(position: Tensor, size: int | Tensor, key: int | Tensor) -> Tensor:
    """Where a keyed permutation of [0, size) sends each position.

    position: int64, 0 <= position < size. size and key broadcast against it: many permutations in one call.
    A Feistel network over the next power of two, walked until the value is inside (Black and Rogaway, 2002,
    "Ciphers with arbitrary finite domains"). Costs O(number of positions) and no memory of the permutation.
    """
    size = torch.as_tensor(size, device=position.device).expand_as(position)
    key = torch.as_tensor(key, device=position.device).expand_as(position)
    largest = int(size.max()) if size.numel() else 1
    half_bits = max(1, math.ceil(max(1, (largest - 1).bit_length()) / 2))
    # Each size gets the smallest even number of bits that holds it, so that few values have to be walked.
    if size.numel() and int(size.min()) != largest:
        half = torch.ceil(torch.log2(size.double().clamp(min=2)) / 2).long().clamp(min=1)
    else:
        half = torch.full_like(position, half_bits)
    value = _feistel(position, half, key)
    outside = (value >= size).nonzero().squeeze(1) if value.dim() == 1 else None
    if outside is None:
        return permute(position.reshape(-1), size.reshape(-1), key.reshape(-1)).view_as(position)
    while outside.numel():
        walked = _feistel(value[outside], half[outside], key[outside])
        value[outside] = walked
        outside = outside[walked >= size[outside]]
    return value


def _feistel(value: Tensor, half_bits: Tensor, key: Tensor) -> Tensor:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for i in range(_ROUNDS):
        left, right = right, left ^ (mix(right + mix(key + i * 0x9E3779B9)) & mask)
    return (left << half_bits) | right


def normal(row: Tensor, width: int, key: int) -> Tensor:
    """Standard normal numbers, one vector of `width` for each row number: float32 (len(row), width).

    row: int64, any values below 2^62; the same number gives the same vector in every process. Box-Muller.
    """
    pairs = (width + 1) // 2
    row_key = mix(mix((row & _MASK) + key) ^ (row >> 32) ^ 0x51ED270B)[:, None]
    column = torch.arange(pairs, device=row.device)[None, :]
    first = mix(row_key + mix(2 * column + 1))
    second = mix(first ^ mix(row_key ^ (2 * column + 2)))
    radius = ((first >> 8).float() + 0.5).mul_(2.0**-24).log_().mul_(-2.0).sqrt_()
    angle = (second >> 8).float().mul_(2.0 * math.pi * 2.0**-24)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=2).view(len(row), -1)[:, :width]
