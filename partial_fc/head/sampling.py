"""Which classes are negatives in which step.

The classes are cut into blocks of 4,096 that have nothing to do with ranks. Each block has a keyed permutation of its
classes and walks along it, rate * 4,096 classes a step, with a new permutation after each round. So every class is a
negative equally often, the draw of any step is known without those before it, it is the same for every number of
ranks, and it costs O(sampled), in time and in memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from partial_fc import keyed
from partial_fc.head.shard import Shard

BLOCK = 4096


@dataclass(frozen=True)
class Sampling:
    """Negative classes as a function of (seed, step, class). rate: the share of all classes in a step, in (0, 1]."""

    num_classes: int
    rate: float
    seed: int

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= 1.0:
            raise ValueError(f"sample_rate is {self.rate}; expected a share of the classes, 0 < rate <= 1")

    def negatives(self, step: int, shard: Shard, device: torch.device | str = "cpu") -> Tensor:
        """The negatives of this step in the shard: class numbers, int64, in no order; a class that ends one round
        and begins the next may stand there twice."""
        full_blocks = self.num_classes // BLOCK
        first, last = shard.start // BLOCK, -(-shard.stop // BLOCK)
        parts = [self._walk(step, first, min(last, full_blocks), BLOCK, device)]
        if last > full_blocks:
            parts.append(self._walk(step, full_blocks, last, self.num_classes % BLOCK, device))
        drawn = torch.cat(parts)
        if shard.start % BLOCK or shard.stop % BLOCK:  # a block that straddles ranks: each keeps its own
            drawn = drawn[(drawn >= shard.start) & (drawn < shard.stop)]
        return drawn

    def _walk(self, step: int, first: int, last: int, size: int, device: torch.device | str) -> Tensor:
        """What blocks [first, last), each of `size` classes, contribute to a step."""
        block_N1 = torch.arange(first, max(first, last), device=device)[:, None]
        begin, end = int(step * self.rate * size), int((step + 1) * self.rate * size)
        drawn = [block_N1.new_empty(0)]
        for round_ in range(begin // size, -(-end // size)):
            low, high = max(begin, round_ * size), min(end, (round_ + 1) * size)
            position_1Q = torch.arange(low - round_ * size, high - round_ * size, device=device)[None]
            key_N1 = keyed.mix(block_N1 + keyed.fold(self.seed, round_, *b"negatives"))
            drawn.append((keyed.permute(position_1Q, size, key_N1) + block_N1 * BLOCK).flatten())
        return torch.cat(drawn)
