"""The batch norms' running statistics: each rank has seen other images; evaluation and checkpoints want one model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from partial_fc.comm import World


class RunningStatistics:
    """Kept aside, to go back to: also by a forward pass whose numbers overflow, which would leave NaN in them for ever
    although its update is not made. (No other layer has buffers.)"""

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
    """Inside, the batch norms have the running statistics of all ranks together; afterwards their own again, so that
    training does not depend on when it was looked at. A collective."""
    own = RunningStatistics(module)
    average_batch_norm(module, world)
    try:
        yield
    finally:
        own.restore()


@torch.no_grad()
def average_batch_norm(module: nn.Module, world: World) -> None:
    """Running statistics of all ranks joined into those of the whole: the mean of means, and the mean variance plus
    the variance of the means. A collective."""
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
    """Running (mean, variance) of each batch norm. A network that is not made of torch's layers has a method
    `moments` that gives them."""
    if hasattr(module, "moments"):
        return module.moments()  # type: ignore[operator]
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    return [(layer.running_mean, layer.running_var) for layer in layers]  # type: ignore[misc]
