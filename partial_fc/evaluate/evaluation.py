"""The training loop's interface of evaluations, and how the ranks share their work."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from partial_fc import terminal
from partial_fc.accessories import threads
from partial_fc.comm import World

Forward = Callable[[Tensor], Tensor]
Batch = TypeVar("Batch")


class Diverged(FloatingPointError):
    """Ends the training: an evaluation raises it on all ranks alike. Any other error of an evaluation ends none."""


class Evaluation(Protocol):
    """Measures a model on all ranks together. Subclasses implement `run`, and `scores` for the best checkpoint."""

    board: str = ""  # prefix of its tags in TensorBoard

    def run(self, forward: Forward, world: World) -> Iterator[tuple[str, float]]:
        """Yields ("SET/accuracy", ...) and so on: the same numbers on every rank, for any number of ranks. forward:
        inputs on the host, as from the loader -> float output. A collective; every rank consumes the whole iterator."""
        ...

    def scores(self, values: Mapping[str, float]) -> dict[str, float]:
        """Returns, by set, the values whose mean decides on the best checkpoint; higher is better."""
        return {}

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        """Returns the log lines. best: the highest score of each set so far."""
        return [f"step {step}: {', '.join(f'{name} {value:.5f}' for name, value in values.items())}"]

    def draw(self, folder: Path) -> None:
        """Draws the pictures of the latest run, on one rank."""
        return


def own_part(count: int, world: World) -> range:
    """Returns this rank's part of `count` items: consecutive ones, in rank order."""
    return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)


def read_ahead(read: Callable[[int], Batch], num_batches: int, world: World, name: str) -> Iterator[Batch]:
    """Yields read(b) of this rank's batches, read ahead by a thread. name: of rank 0's progress bar."""
    previous: Future[Batch] | None = None
    own = own_part(num_batches, world)
    shown = world.rank == 0
    with (
        threads(1, "evaluation") as ahead,
        terminal.bar(total=len(own), desc=name, unit="batch", shown=shown, leave=False) as bar,
    ):
        for batch in own:
            current = ahead.submit(read, batch)
            if previous:
                yield previous.result()
                bar.update()
            previous = current
        if previous:
            yield previous.result()
            bar.update()
