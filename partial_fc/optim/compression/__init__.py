"""Gradient compression: sums a bucket over the ranks exactly, or in fewer bytes.

    kind       bytes handed in for n fp32 values   the sum is that of
    none       4 n                                 the gradients
    fp16       2 n                                 the gradients rounded to float16, added up in float16
    bf16       2 n + 2 n / W                       the gradients rounded to bfloat16, added up in float32
    2bit       n / 4                               -t, 0 or t a value; the rest is kept as residual (two_bit.py)
    powersgd   4 r (a + b) for a matrix of a x b   matrices of rank r; the rest is kept, too (powersgd.py)

A rank's link carries 2 (W - 1) / W times the message of an all-reduce; bf16, with its two messages, as much as fp16.
The codes of 2bit are gathered: W - 1 times the message, at W = 32 as much as fp32 and at W = 16 as much as fp16. For
more ranks use another kind.
"""

from collections.abc import Callable
from typing import Literal

from partial_fc.optim.compression.base import (
    BFloat16,
    Bucket,
    Compressor,
    Float16,
    GradientScale,
    NoCompression,
    merge_residuals,
)
from partial_fc.optim.compression.powersgd import PowerSGD
from partial_fc.optim.compression.two_bit import TwoBit

CompressionKind = Literal["none", "fp16", "bf16", "2bit", "powersgd"]

__all__ = ["Bucket", "CompressionKind", "Compressor", "GradientScale", "build_compressor", "merge_residuals"]


def build_compressor(kind: CompressionKind, *, threshold: float = 0.5, rank: int = 4, seed: int = 0) -> Compressor:
    """Returns a compressor, for one GradientSync. threshold: of 2bit, in units of the gradient summed over images;
    rank, seed: powersgd's matrices and first guess. Raises ValueError for an unknown kind or an invalid number."""
    compressors: dict[str, Callable[[], Compressor]] = {
        "none": NoCompression,
        "fp16": Float16,
        "bf16": BFloat16,
        "2bit": lambda: TwoBit(threshold),
        "powersgd": lambda: PowerSGD(rank, seed),
    }
    if kind not in compressors:
        raise ValueError(f"gradient compression {kind!r} is none of {', '.join(compressors)}")
    return compressors[kind]()
