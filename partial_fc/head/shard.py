"""The class range of a rank: the only place that computes it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """The half-open class range [start, stop) of one rank, out of num_classes."""

    start: int
    stop: int
    num_classes: int

    @classmethod
    def of(cls, num_classes: int, rank: int, size: int) -> "Shard":
        """Contiguous ranges in rank order; the first num_classes % size ranks own one class more. No class is
        padded in, and a rank owns none where there are fewer classes than ranks."""
        if num_classes < 1:
            raise ValueError(f"num_classes is {num_classes}; expected at least 1")
        each, more = divmod(num_classes, size)
        start = rank * each + min(rank, more)
        return cls(start, start + each + (rank < more), num_classes)

    @staticmethod
    def owners(class_N: Tensor, num_classes: int, size: int) -> Tensor:
        """Returns the rank that stores each class, (N,) int64, by the ranges of `of`. class_N: int64, in [0,
        num_classes)."""
        each, more = divmod(num_classes, size)
        split = more * (each + 1)  # the first class of the ranks that own one less
        late_N = more + (class_N - split).div(max(each, 1), rounding_mode="floor")
        return torch.where(class_N < split, class_N.div(each + 1, rounding_mode="floor"), late_N)

    def __len__(self) -> int:
        return self.stop - self.start

    def locate(self, class_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns classes' numbers from the shard's first class (where they are elsewhere, any in its range), and which
        are elsewhere, bool. class_N: any integers."""
        local_N = class_N - self.start
        if not len(self):
            return local_N.zero_(), local_N.new_ones(local_N.shape, dtype=torch.bool)
        inside_N = local_N.clamp(0, len(self) - 1)
        return inside_N, inside_N != local_N
