"""Runs recipes several times in one launch, as a rank of it: starting processes takes longer than training few steps.

    launch.several([Given(...), ...], num_ranks=2)                          with processes that are forked
    horovodrun -np 2 ... python -m tests.recipes.several GIVEN GIVEN ...    with a launcher; each GIVEN as JSON

Every rank prints "rank R ended with: " and the exit status of each run, or the error that ended it. After one that
trained, all ranks compare the weights that they compute with. (That the parts of a run continue in processes of their
own, launchers and their command lines: tests/faults/signals.)
"""

import contextlib
import importlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from partial_fc import comm
from partial_fc.train import loop
from partial_fc.train.job import Job, Outcome
from partial_fc.verbs.train import exit_now
from tests.recipes.faults import put_in

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Given:
    """One run: a recipe's module, the words of its command line, faults (faults.py), its working directory."""

    recipe: str
    words: Sequence[str]
    faults: str = ""
    folder: str = str(ROOT)

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def main(runs: Sequence[Given]) -> None:
    world = comm.init("cpu")
    end = world.close
    world.close = lambda: None  # type: ignore[method-assign]
    comm.init = lambda *_, **__: world
    for given in runs:
        put_in(given.faults, is_last=world.rank == world.size - 1)
        try:
            with contextlib.chdir(given.folder):
                ended = str(_comparing(given.recipe, world).main(list(given.words)))
        except (ValueError, FloatingPointError) as error:
            ended = f"{type(error).__name__}: {error}"
        print(f"rank {world.rank} ended with: {ended}\n", end="", flush=True)
    end()


def _comparing(recipe: str, world: comm.World):
    """The recipe's module; the loop's `train`, which it imports when it is called, compares the replicas at its end."""
    train = loop.train
    if not hasattr(train, "compares"):

        def train_and_compare(job: Job) -> Outcome:
            outcome = train(job)
            checksum = 0
            for p in job.backbone.module.parameters():  # type: ignore[attr-defined]
                checksum = zlib.crc32(p.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes(), checksum)
            all_W = world.all_gather(torch.tensor([checksum]), name="test/weights")
            assert (all_W == checksum).all(), "the replicas have parted"
            return outcome

        train_and_compare.compares = True  # type: ignore[attr-defined]
        loop.train = train_and_compare
    return importlib.import_module(recipe)


def become_rank(
    rank: int, num_ranks: int, port: int, output: str, program: Callable[..., object], *arguments: object
) -> None:
    """In a forked process, with what torchrun would tell it: program(*arguments). What it prints is appended to
    `output`."""
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    numbers = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    program(*arguments)


if __name__ == "__main__":
    main([Given(**json.loads(words)) for words in sys.argv[1:]])
    exit_now(0)
