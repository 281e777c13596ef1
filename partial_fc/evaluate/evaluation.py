"""What the training loop asks of an evaluation, and how the ranks share its work."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

from partial_fc import terminal
from partial_fc.comm import World

Forward = Callable[[Tensor], Tensor]
Batch = TypeVar("Batch")


class Evaluation(Protocol):
    """Measures a model on all ranks together. An evaluation that inherits this needs `run` alone, and `scores` where it
    is to decide which checkpoint is the best."""

    board: str = ""  # what TensorBoard's tags of its values begin with

    def run(self, forward: Forward, world: World) -> Iterator[tuple[str, float]]:
        """Yields ("SET/accuracy", ...) and so on: the same numbers on every rank, for any number of ranks. forward:
        inputs on the host, as the loader gives them -> float output. A collective; every rank consumes the whole
        iterator."""
        ...

    def scores(self, values: Mapping[str, float]) -> dict[str, float]:
        """By set, the values that decide which checkpoint is the best: the mean over all of them, higher is better."""
        return {}

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        """What the log says. best: the highest score of each set so far."""
        return [f"step {step}: {', '.join(f'{name} {value:.5f}' for name, value in values.items())}"]

    def draw(self, folder: Path) -> None:
        """Writes the pictures of the latest run, on one rank."""
        return


def own_part(count: int, world: World) -> range:
    """This rank's part of `count` things: consecutive ones, in rank order."""
    return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)


def read_ahead(read: Callable[[int], Batch], num_batches: int, world: World, name: str) -> Iterator[Batch]:
    """read(b) of this rank's batches, which are consecutive ones. A thread reads one while the network works on the one
    before it. name: of rank 0's progress bar."""
    previous: Future[Batch] | None = None
    own = own_part(num_batches, world)
    shown = world.rank == 0
    with (
        ThreadPoolExecutor(1) as ahead,
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
