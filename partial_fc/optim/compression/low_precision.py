"""Exchanges that send every value, in as many bits as it has or in 16."""

import torch
from torch import Tensor

from partial_fc.comm import World
from partial_fc.optim.compression.base import Compressor, GradientScale, Stages
from partial_fc.optim.compression.bucket import Bucket


class NoCompression(Compressor):
    """One all-reduce in the gradients' own dtype, in place."""

    kind = "none"

    def prepare(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.flat.dtype == torch.bfloat16:
                raise ValueError(
                    f"the gradient of {bucket.names[0]} is torch.bfloat16, which not every backend sums; use gradient "
                    "compression bf16, which adds up in float32"
                )

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        summed = yield world.start_all_reduce(bucket.flat, name=bucket.name, in_place=True)
        _put(bucket, summed, scale)


class Float16(Compressor):
    """One all-reduce in float16, like Horovod's `Compression.fp16`.

    The loss scale stays in while it travels. A value or a sum beyond 65504 arrives as infinity, for whoever asks
    `finite()`. Without a loss scale, what is below 3e-8 is lost.
    """

    kind = "fp16"

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        sent = bucket.flat.to(torch.float16)
        summed = yield world.start_all_reduce(sent, name=bucket.name, in_place=True)
        _put(bucket, summed, scale)


class BFloat16(Compressor):
    """bfloat16 on the way, float32 in the sum: no backend adds bfloat16 numbers, and 8 bits are too few to add up in.

    Every rank owns 1 / W of the bucket: it gets all ranks' gradients of that part, adds them up, and hands out the
    sum. The same bytes on a link as a ring's all-reduce in 16 bits.
    """

    kind = "bf16"

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        size = len(bucket.flat)
        block = -(-size // world.size)
        sent = bucket.flat.new_zeros(world.size * block, dtype=torch.bfloat16)
        sent[:size].copy_(bucket.flat)
        parts = yield world.start_all_to_all(sent, name=bucket.name)
        block_sum = parts.view(world.size, block).sum(0, dtype=torch.float32).bfloat16()
        summed = yield world.start_all_gather(block_sum, [block] * world.size, name=f"{bucket.name}/sum")
        _put(bucket, summed[:size], scale)


def _put(bucket: Bucket, summed: Tensor, scale: GradientScale) -> None:
    if bucket.summed is not summed:
        bucket.summed.copy_(summed)
    if scale.loss_scale != 1.0:
        bucket.summed.div_(scale.loss_scale)
