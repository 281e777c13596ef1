"""The classes of a rank. Nobody else computes them."""

from dataclasses import dataclass


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

    def __len__(self) -> int:
        return self.stop - self.start
