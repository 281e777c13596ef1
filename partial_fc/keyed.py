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
            key = _mix_int((key ^ (part & _MASK)) + 0x9E3779B9)
            part >>= 32
            if part in (0, -1):
                break
    return key


def _mix_int(x: int) -> int:
    """`mix` of one number: tensors would take a hundred times as long."""
    x &= _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def permute(position: Tensor, size: int, key: int | Tensor) -> Tensor:
    """Where a keyed permutation of [0, size) sends each position.

    position: int64, 0 <= position < size. key broadcasts against it: (N, 1) keys and (N, Q) positions look into N
    permutations at once. Costs O(number of positions); the permutation itself is never formed. A Feistel network
    over the next even power of two, walked until the value is inside (Black and Rogaway, 2002, "Ciphers with
    arbitrary finite domains").
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = torch.as_tensor(key, device=position.device)
    num_rounds = 5 if half_bits > 4 else 12  # small domains need more rounds to look random
    round_keys = [mix(keys + i * 0x9E3779B9) for i in range(num_rounds)]
    value = _feistel(position, half_bits, round_keys)
    while (outside := value >= size).any():
        value = torch.where(outside, _feistel(value, half_bits, round_keys), value)
    return value


def _feistel(value: Tensor, half_bits: int, round_keys: list[Tensor]) -> Tensor:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in round_keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
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
