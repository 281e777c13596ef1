"""The batch norms' running statistics: each rank has seen other images; evaluation and checkpoints want one model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from partial_fc.comm import World


class RunningStatistics:
    """Kept aside, to go back to: also by a forward pass whose numbers overflow, which would leave NaN in them for ever
    although its update is not made."""

    def __init__(self, module: nn.Module):
        self._buffers = [b for m in module.modules() if isinstance(m, _BatchNorm) for b in m.buffers()]
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
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if world.size == 1 or not layers:
        return
    both = []
    for layer in layers:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        mean = layer.running_mean.double()
        both.append(torch.cat((mean, layer.running_var.double() + mean.square())))
    total = world.all_reduce(torch.cat(both), name="backbone/batch_norm") / world.size
    for layer, part in zip(layers, total.split([len(b) for b in both]), strict=True):
        mean, square = part.chunk(2)
        layer.running_mean.copy_(mean)  # type: ignore[union-attr]
        layer.running_var.copy_(square - mean.square())  # type: ignore[union-attr]
