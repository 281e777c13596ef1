"""The base of all compressors, those that send every value, and what becomes of residuals of other numbers of ranks."""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from partial_fc.comm import Work, World
from partial_fc.optim.compression.bucket import Bucket

# Yields the message that it waits for, is resumed with what arrived, and may start another.
Stages = Generator[Work, Tensor, None]


@dataclass(frozen=True)
class GradientScale:
    """The unit of the gradients of one update."""

    loss_scale: float = 1.0  # they are those of the loss times this
    global_batch: int | None = None  # they are the mean over so many images, accumulated ones included


class Compressor:
    """A way to sum buckets over the ranks. What it remembers of them (residuals) is for one GradientSync only."""

    kind: str
    needs_global_batch = False

    def prepare(self, buckets: list[Bucket]) -> None:
        """Once, before anything runs. Raises ValueError where this kind cannot take a bucket's dtype."""

    def run(self, bucket: Bucket, scale: GradientScale, world: World) -> Stages:
        """From bucket.flat, this rank's gradient, to bucket.summed, the sum over the ranks without the loss scale. The
        same number of messages on all ranks. A value that is not finite on one rank is not finite on any after it."""
        raise NotImplementedError

    def undo(self) -> None:
        """Restores what was remembered before the last `run`: its update is not made."""

    def named(self) -> dict[str, Tensor]:
        """Returns what is remembered, as 'residual/<parameter>' (what this rank has left out so far: every rank's is
        different) and 'q/<parameter>' (equal on all ranks); not copies."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Returns copies of `named()`, for a checkpoint."""
        return {name: t.clone(memory_format=torch.contiguous_format) for name, t in self.named().items()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `state` gave to this rank, or `merge_residuals`. Raises ValueError for another network's."""
        tensors = self.named()
        if state.keys() != tensors.keys():
            raise ValueError(
                f"gradient compression {self.kind}: the state has {sorted(state)}, expected {sorted(tensors)}; was it "
                "saved by another kind, or for another network?"
            )
        for name, t in tensors.items():
            if state[name].shape != t.shape:
                raise ValueError(
                    f"gradient compression {self.kind}: {name} has shape {tuple(state[name].shape)} in the state; "
                    f"expected {tuple(t.shape)}: give the --compression-rank that it was saved with"
                )
            t.copy_(state[name])

    def reset(self) -> None:
        """Forgets all residuals, as before the first update."""
        for t in self.named().values():
            t.zero_()


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


def merge_residuals(states: Iterable[Mapping[str, Tensor]], num_ranks: int) -> dict[str, Tensor]:
    """Turns the states of all ranks that saved into the state of each of `num_ranks` ranks that go on: an equal part of
    the sum of the residuals. states: one after the other, so that not all need be in memory."""
    states = iter(states)
    first = next(states, {})
    sums = {name: t.double() for name, t in first.items() if name.startswith("residual/")}
    for number, state in enumerate(states, 1):
        if state.keys() != first.keys():
            raise ValueError(f"state {number} names other tensors than state 0: they are not of one run")
        for name, t in state.items():
            if t.shape != first[name].shape:
                raise ValueError(
                    f"state {number}: {name} has shape {tuple(t.shape)}, {tuple(first[name].shape)} before"
                )
            if name in sums:
                sums[name] = sums[name] + t
    return {**first, **{name: (t / num_ranks).to(first[name].dtype) for name, t in sums.items()}}
