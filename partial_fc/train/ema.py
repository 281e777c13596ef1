"""The exponential moving average of a backbone's weights (--ema)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from partial_fc.train.precision import Weights


class Average:
    """The moving average of the trained weights and of the batch norms' running statistics, in the weights' fp32.

        average = decay * average + (1 - decay) * weight          after each update that was not skipped

    The statistics are this rank's; those of all ranks are joined for evaluation and checkpoints, as the weights' own.
    Other tensors of the network, such as frozen weights and counts, have no average.
    """

    def __init__(self, weights: Weights, decay: float):
        self.decay = decay
        self._weights = weights
        now = {name: p.detach() for name, p in weights.named_parameters() if p.requires_grad}
        now |= {name: b for name, b in weights.module.named_buffers() if b.is_floating_point()}
        self._now = list(now.values())
        self.tensors = {name: t.clone() for name, t in now.items()}

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self.tensors.values()), self._now, 1 - self.decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Starts again from the present weights."""
        torch._foreach_copy_(list(self.tensors.values()), self._now)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads those that are given."""
        for name, t in tensors.items():
            self.tensors[name].copy_(t)

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """Gives the network the average inside the block, and `tensors` the weights; without a copy of all."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, now in zip(self.tensors.values(), self._now, strict=True):
            held = now.clone()
            now.copy_(average)
            average.copy_(held)
        self._weights.publish()
