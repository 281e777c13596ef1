"""Two bits a value: MXNet's gradient compression (KVStore, `set_gradient_compression({'type': '2bit'})`, 1.9.1).

MXNet's gradient is the sum over images, not their mean; threshold and residual have that unit here too.
"""

import math
from functools import cache

import torch
from torch import Tensor

from partial_fc.comm import World
from partial_fc.optim.compression.base import Bucket, Compressor, GradientScale, Stages

# Bits 7-6, 5-4, 3-2, 1-0 of byte i // 4 hold value i of a word for i % 4 = 0, 1, 2, 3.
_UP, _DOWN, _NOT_FINITE = 0b11, 0b10, 0b01  # MXNet does not use the last
# Times four codes, one a byte of a 32-bit number, this collects their bits in the uppermost byte, in order.
_TO_TOP_BYTE = (1 << 30) + (1 << 20) + (1 << 10) + 1
_CACHED = 1 << 16  # values a CPU codes at a time; a multiple of 16


def encode_(residual_N: Tensor, threshold: float) -> Tensor:
    """Subtracts `threshold` from each value of at least that, adds it to each of at most -threshold, in place, and
    returns the codes: uint8 (N / 4,). N is a multiple of 16."""
    size = _CACHED if residual_N.device.type == "cpu" else max(1, len(residual_N))
    return torch.cat([_encode_part_(part, threshold) for part in residual_N.split(size)])


def _encode_part_(residual_N: Tensor, threshold: float) -> Tensor:
    up = (residual_N >= threshold).view(torch.int8)
    down = (residual_N <= -threshold).view(torch.int8)
    code_N = up * _UP + down * _DOWN
    # A CPU checks further only if the sum requires it; a GPU would have to wait for the sum.
    if residual_N.device.type != "cpu" or not residual_N.sum().isfinite():
        code_N.masked_fill_(~residual_N.isfinite(), _NOT_FINITE)
    residual_N.sub_(up - down, alpha=threshold)
    # On little-endian machines the first byte is the lowest.
    return (code_N.view(torch.int32) * _TO_TOP_BYTE).bitwise_right_shift_(24).to(torch.uint8)


def decode(code: Tensor, threshold: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decodes uint8 (N / 4,) to (N,): threshold, -threshold, 0, or NaN if the sender's value was NaN or Inf."""
    return _values_of_bytes(threshold, dtype, code.device).index_select(0, code.int()).view(-1)


@cache
def _values_of_bytes(threshold: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the values of each byte of codes: (256, 4)."""
    meaning = torch.tensor((0.0, math.nan, -threshold, threshold), dtype=dtype)
    byte, shift = torch.arange(256)[:, None], torch.tensor((6, 4, 2, 0))
    return meaning[(byte >> shift) & 3].to(device)


class TwoBit(Compressor):
    """Adds the gradient to the residual, sends t, -t or 0 of it, and keeps the rest. Every rank gets all ranks' codes
    and adds them in rank order, so that all have the same bits.

    The gradient is divided by the loss scale and multiplied by the global batch first, and the sum divided by that
    batch. Memory: two float32 residuals a value, the current one and that of `undo`.
    """

    kind = "2bit"
    needs_global_batch = True

    def __init__(self, threshold: float):
        if not (math.isfinite(threshold) and threshold > 0):
            raise ValueError(f"threshold {threshold} of 2-bit compression: expected a finite number above 0")
        self.threshold = threshold
        self._buckets: list[Bucket] = []
        self._residual: list[Tensor] = []
        self._before: list[Tensor] = []

    def prepare(self, buckets: list[Bucket]) -> None:
        assert not self._buckets, "a compressor with a memory serves one GradientSync"
        self._buckets = buckets
        self._residual = [torch.zeros_like(bucket.summed) for bucket in buckets]
        self._before = [torch.zeros_like(bucket.summed) for bucket in buckets]

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        assert scale.global_batch is not None
        number = bucket.number
        before, residual = self._residual[number], self._before[number]
        torch.add(before, bucket.flat, alpha=scale.global_batch / scale.loss_scale, out=residual)
        self._residual[number], self._before[number] = residual, before
        code = encode_(residual, self.threshold)
        codes = yield world.start_all_gather(code, [len(code)] * world.size, name=bucket.name)
        first, *others = codes.split(len(code))
        total = decode(first, self.threshold, residual.dtype)
        for other in others:
            total += decode(other, self.threshold, residual.dtype)
        torch.div(total, scale.global_batch, out=bucket.summed)

    def undo(self) -> None:
        self._residual, self._before = self._before, self._residual

    def named(self) -> dict[str, Tensor]:
        return {
            f"residual/{name}": t
            for bucket, residual in zip(self._buckets, self._residual, strict=True)
            for name, t in zip(bucket.names, bucket.views(residual), strict=True)
        }
