"""The batch norms' running statistics, which differ between ranks, joined for evaluation and checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from partial_fc.comm import World


class RunningStatistics:
    """A copy of the running statistics, to undo a forward pass: one that overflows would leave NaN in them although its
    update is skipped. (No other layer has buffers.)"""

    def __init__(self, module: nn.Module):
        self._buffers = list(module.buffers())
        self._kept = [b.clone() for b in self._buffers]

    @torch.no_grad()
    def keep(self) -> None:
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)

    @torch.no_grad()
    def restore(self) -> None:
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)


@contextmanager
def joined_statistics(module: nn.Module, world: World) -> Iterator[None]:
    """Gives the batch norms the running statistics of all ranks together inside the block, and restores their own, so
    that evaluations do not change training. A collective."""
    own = RunningStatistics(module)
    average_batch_norm(module, world)
    try:
        yield
    finally:
        own.restore()


@torch.no_grad()
def average_batch_norm(module: nn.Module, world: World) -> None:
    """Joins all ranks' running statistics: mean of means, mean variance plus variance of means. A collective."""
    moments = running_moments(module)
    if world.size == 1 or not moments:
        return
    both = [torch.cat((mean.double(), var.double() + mean.double().square())) for mean, var in moments]
    total = world.all_reduce(torch.cat(both), name="backbone/batch_norm") / world.size
    for (mean, var), part in zip(moments, total.split([len(b) for b in both]), strict=True):
        joined_mean, joined_square = part.chunk(2)
        mean.copy_(joined_mean)
        var.copy_(joined_square - joined_mean.square())


def running_moments(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Returns running (mean, variance) of each batch norm. Networks without torch's layers have a method `moments`."""
    if hasattr(module, "moments"):
        return module.moments()  # type: ignore[operator]
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    return [(layer.running_mean, layer.running_var) for layer in layers]  # type: ignore[misc]
