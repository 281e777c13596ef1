"""Pseudo-random functions of a key and a counter, without sequence or state.

Everything independent of the number of ranks, the order of calls and restarts (sample order, a step's negative classes,
a class centre's first value) uses these functions.

All arithmetic is on integer tensors that hold 32-bit values, so a CPU and a GPU give the same integers. The mixing
constants are those of Chris Wellons' `lowbias32` (public domain, https://nullprogram.com/blog/2018/07/31/).
"""

import math
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
Bits = TypeVar("Bits", int, Tensor)


def hash32(x: Bits) -> Bits:
    """A bijection of 32-bit integers in which every output bit depends on every input bit."""
    x = x & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def derive_key(*parts: int) -> int:
    """Hashes integers of any size to one 32-bit key; the order of the parts matters."""
    key = 0x9E3779B9
    for part in parts:
        while True:
            key = hash32((key ^ (part & _MASK)) + 0x9E3779B9)
            part >>= 32
            if part in (0, -1):
                break
    return key


def permute(position: Tensor, size: int, key: int | Tensor) -> Tensor:
    """Maps each position by a keyed permutation of [0, size).

    position: int64, 0 <= position < size. key broadcasts against it: (N, 1) keys and (N, Q) positions evaluate N
    permutations at once. Costs O(number of positions); the permutation itself is never formed. A Feistel network over
    the next even power of two, repeated until the value is inside (Black and Rogaway, 2002, "Ciphers with arbitrary
    finite domains").
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = torch.as_tensor(key, device=position.device)
    num_rounds = 5 if half_bits > 4 else 12  # small domains need more rounds to look random
    round_keys = [hash32(keys + i * 0x9E3779B9) for i in range(num_rounds)]
    value = _feistel(position, half_bits, round_keys)
    while (outside := value >= size).any():
        value = torch.where(outside, _feistel(value, half_bits, round_keys), value)
    return value


def _feistel(value: Tensor, half_bits: int, round_keys: list[Tensor]) -> Tensor:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for key in round_keys:
        left, right = right, left ^ (hash32(right ^ key) & mask)
    return (left << half_bits) | right


def normal(row: Tensor, width: int, key: int) -> Tensor:
    """Returns standard normal numbers, a vector per row number: float32 (len(row), width).

    row: int64, any values below 2^62; the same number gives the same vector in every process (on the same kind of
    device: logarithm and cosine differ in the last bit between kinds). Box-Muller.
    """
    pairs = (width + 1) // 2
    column = torch.arange(pairs, device=row.device)
    first_P, second_P = hash32(2 * column + 1).int(), (2 * column + 2).int()
    normal_N2P = torch.empty(len(row), pairs, 2, dtype=torch.float32, device=row.device)
    for part, key_N1 in _row_keys(row, pairs, key, 0x51ED270B):
        first = _hash32_inplace(key_N1 + first_P)
        second = _hash32_inplace(_hash32_inplace(key_N1 ^ second_P).bitwise_xor_(first))
        radius = _upper_24_(first).add_(0.5).mul_(2.0**-24).log_().mul_(-2.0).sqrt_()
        angle = _upper_24_(second).mul_(2.0 * math.pi * 2.0**-24)
        torch.mul(radius, angle.cos(), out=normal_N2P[part, :, 0])
        torch.mul(radius, angle.sin_(), out=normal_N2P[part, :, 1])
    return normal_N2P.view(len(row), 2 * pairs)[:, :width]


def uniform(row: Tensor, width: int, key: int) -> Tensor:
    """Returns uniform numbers in [0, 1), multiples of 2^-24, a vector per row number: float32 (len(row), width).

    row: int64, any values below 2^62; the same number gives the same vector in every process and on every device.
    """
    column_W = torch.arange(width, dtype=torch.int32, device=row.device)
    uniform_NW = torch.empty(len(row), width, dtype=torch.float32, device=row.device)
    for part, key_N1 in _row_keys(row, width, key, 0x2545F491):
        uniform_NW[part] = _upper_24_(_hash32_inplace(key_N1 + column_W)).mul_(2.0**-24)
    return uniform_NW


def rounding_key(seed: int, stream: int, step: int) -> int:
    """Returns the key of the noise that rounds one tensor (stream) in one step."""
    return derive_key(seed, stream, step, *b"rounding")


def rounding_noise(row: Tensor, width: int, key: int) -> Tensor:
    """Returns 16 random bits per number of each row, for unbiased rounding of float32 to bfloat16: int32 (len(row),
    width), values in [0, 2^16).

    row: int64, any values below 2^62. With 32-bit wrap-around, for the columns 2j and 2j + 1 of a row:
        row_key = hash32(hash32((row & 0xFFFFFFFF) + key) ^ (row >> 32))
        h = hash32(row_key + j);  noise[2j] = h & 0xFFFF;  noise[2j + 1] = h >> 16
    """
    pairs = (width + 1) // 2
    pair_P = torch.arange(pairs, dtype=torch.int32, device=row.device)
    noise = torch.empty(len(row), 2 * pairs, dtype=torch.int32, device=row.device)
    for part, key_N1 in _row_keys(row, pairs, key, 0):
        # A 32-bit number viewed as 16-bit numbers has its lower half first (on every machine that torch runs on).
        noise[part] = _hash32_inplace(key_N1 + pair_P).view(torch.int16)
    return noise.bitwise_and_(0xFFFF)[:, :width]


def _row_keys(row: Tensor, columns: int, key: int, salt: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows of a part, their 32-bit keys as int32 (n, 1)), in parts whose results fit the cache."""
    row_key = hash32(hash32((row & _MASK) + key) ^ (row >> 32) ^ salt).int()[:, None]
    size = max(1, (1 << 16 if row.device.type == "cpu" else 1 << 24) // columns)
    for begin in range(0, len(row), size):
        part = slice(begin, min(begin + size, len(row)))
        yield part, row_key[part]


def _hash32_inplace(x: Tensor) -> Tensor:
    """Computes `hash32` in place on int32 tensors with the same bits: several times as fast."""
    shifted = torch.empty_like(x)
    for bits, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1)):
        torch.bitwise_right_shift(x, bits, out=shifted)  # extends the sign, hence the mask
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))
        if factor != 1:
            x.mul_(factor)
    return x


def _upper_24_(x: Tensor) -> Tensor:
    """Returns the upper 24 of 32 bits (int32, overwritten) as float32 integers."""
    return x.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float()
