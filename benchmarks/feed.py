"""`python -m benchmarks.feed`: what feeding a training costs the thread that launches its kernels.

The main thread stands for a training: for each batch it makes a fixed number of small operations (torch.add of 8
numbers), as a GPU's step is launched, then takes the next batch. The loader decodes in threads of this process, in a
process beside it, or is torch's DataLoader with processes. Every side makes as many operations a batch as take 0.8 of
the time in which one thread decodes it alone, so two cores suffice. Cores share caches, memory and clock: what a
stranger's process that makes operations takes from decoding is measured, too. Sides in turn, medians with smallest and
largest.
"""

import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torch.utils.data import DataLoader, Dataset

from partial_fc.cli import call
from partial_fc.data import Loader, SquareImage
from partial_fc.data.open import open_source
from partial_fc.data.transform import mirror
from partial_fc.flags.facts import BATCH, PIXELS, THREADS, In

from . import networks

_SHARE = 0.8


@dataclass(frozen=True)
class FeedOptions:
    """Launches small operations beside a loader."""

    source: Annotated[Path | None, tyro.conf.Positional] = None
    """A folder with train.rec, a .rec file, a folder of class folders, or a list; none: 8,000 JPEGs, drawn for it."""
    image_size: Annotated[int, In(PIXELS)] = 112
    batch_size: Annotated[int, In(BATCH)] = 128
    threads: Annotated[tuple[int, ...], In(THREADS)] = (1, 2, 8)
    """Of each loader; processes of torch's DataLoader."""
    seconds: float = 4.0
    """Of each measurement."""
    rounds: int = 5


@dataclass(frozen=True)
class Fed:
    """us of an operation, images a second."""

    launch_us: float
    images_per_s: float


class Images(Dataset[Any]):
    """The same samples for torch's DataLoader."""

    def __init__(self, path: Path, size: int) -> None:
        self.source, self.transform = open_source(path), SquareImage(size, mirror)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = self.source.read(index)
        return torch.from_numpy(self.transform(sample, np.random.default_rng(index))), sample.label


def launch(count: int) -> float:
    """Returns the seconds of so many operations."""
    a, b = torch.ones(8), torch.ones(8)
    began = time.perf_counter()
    for _ in range(count):
        torch.add(a, b)
    return time.perf_counter() - began


def fed(batches: Iterator[Any], batch_size: int, launches: int, seconds: float) -> Fed:
    for _ in range(3):
        next(batches)
    spent, number, began = 0.0, 0, time.perf_counter()
    while (now := time.perf_counter() - began) < seconds:
        spent += launch(launches)
        next(batches)
        number += 1
    return Fed(1e6 * spent / (number * launches) if launches else math.nan, number * batch_size / now)


def make_operations() -> None:
    torch.set_num_threads(1)
    while True:
        launch(100_000)


def beside_a_stranger(measure: Callable[[], Fed]) -> Fed:
    """Measures while another process makes operations, which wants nothing of this one."""
    stranger = multiprocessing.get_context("spawn").Process(target=make_operations, daemon=True)
    stranger.start()
    time.sleep(5)  # until it has imported torch
    try:
        return measure()
    finally:
        stranger.kill()
        stranger.join()


def bench_feed(options: FeedOptions) -> None:
    """Measures and prints the results."""
    if options.source is None:
        with tempfile.TemporaryDirectory(prefix="feed-") as folder:
            networks.draw(Path(folder, "images"), 4000, options.image_size)
            bench_feed(replace(options, source=Path(folder, "images")))
        return
    torch.set_num_threads(1)
    path = options.source

    def ours(mode: Literal["threads", "process"], threads: int, launches: int) -> Fed:
        with Loader(
            open_source(path), SquareImage(options.image_size, mirror), batch_size=options.batch_size,
            num_workers=threads, mode=mode,
        ) as loader:  # fmt: skip
            return fed(loader, options.batch_size, launches, options.seconds)

    def torchs(processes: int, launches: int) -> Fed:
        loader = DataLoader(
            Images(path, options.image_size), options.batch_size, shuffle=True, num_workers=processes,
            drop_last=True, persistent_workers=True,
        )  # fmt: skip
        batches = (batch for _ in iter(int, 1) for batch in loader)
        return fed(batches, options.batch_size, launches, options.seconds)

    alone = median(1e6 * launch(100_000) / 100_000 for _ in range(5))
    rate = median(ours("threads", 1, 0).images_per_s for _ in range(3))
    launches = round(_SHARE * 1e6 * options.batch_size / rate / alone)
    sides: dict[str, Callable[[], Fed]] = {
        "operations alone": lambda: Fed(1e6 * launch(launches * 20) / (launches * 20), math.nan),
        "decoding alone, 1 thread": lambda: ours("threads", 1, 0),
        "decoding, a stranger beside it": lambda: beside_a_stranger(lambda: ours("threads", 1, 0)),
    }
    for count in options.threads:
        what = f"{count} thread{'s' * (count > 1)}"
        sides[f"{what} of this process"] = partial(ours, "threads", count, launches)
        sides[f"{what} of a process beside it"] = partial(ours, "process", count, launches)
        sides[f"DataLoader, {count} process{'es' * (count > 1)}"] = partial(torchs, count, launches)
    measured: dict[str, list[Fed]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, measure in sides.items():
            measured[side].append(measure())
    print(f"{launches} operations a batch of {options.batch_size}; {options.rounds} rounds")
    print(f"{'':32}  us an operation         images/s")
    for side, rows in measured.items():
        us, images = ([getattr(row, name) for row in rows] for name in ("launch_us", "images_per_s"))
        print(f"{side:32}  {_spread(us, '.2f'):>22}  {_spread(images, ',.0f'):>24}")


def _spread(values: list[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    sys.exit(call(bench_feed, sys.argv[1:], "python -m benchmarks.feed"))
