"""Runs recipe `mnist` several times in one launch: `python -m tests.recipes.mnist_several "FLAGS" "FLAGS" ...`, under a
launcher. Starting processes takes longer than training a few steps.

With OVERFLOW_AT=N in the environment the images of rank 1 are too bright in step N of runs with float16 weights. After
each run all ranks compare the weights that they compute with.
"""

import os
import shlex
import sys

import torch

from partial_fc import comm
from recipes import mnist


def main(runs: list[str]) -> None:
    world = comm.init("cpu")
    end = world.close
    world.close = lambda: None  # type: ignore[method-assign]
    comm.init = lambda *_, **__: world
    pixels, train = mnist.pixels, mnist.train

    bright_step = -1

    def too_bright(image_B1HW: torch.Tensor) -> torch.Tensor:
        return pixels(image_B1HW) * (1e6 if world.step == bright_step else 1)

    def train_and_compare(run: mnist.Run, num_updates: int):
        nonlocal bright_step
        here = world.rank == 1 and run.precision.mode == "fp16-o2"
        bright_step = int(os.environ.get("OVERFLOW_AT", -1)) if here else -1
        found = train(run, num_updates)
        own = torch.cat([p.detach().double().flatten() for p in run.model.parameters()])
        all_W = world.all_gather(own.unsqueeze(0), name="test/weights")
        assert all(torch.equal(own, other) for other in all_W), "the replicas have parted"
        return found

    mnist.pixels, mnist.train = too_bright, train_and_compare  # type: ignore[attr-defined]
    for flags in runs:
        assert mnist.main(shlex.split(flags)) == 0
    end()


if __name__ == "__main__":
    main(sys.argv[1:])
