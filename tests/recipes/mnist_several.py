"""Runs recipe `mnist` several times in one launch: `python -m tests.recipes.mnist_several "FLAGS" "FLAGS" ...`, under a
launcher. Starting processes takes longer than training a few steps.

With OVERFLOW_AT=N in the environment the images of rank 1 are too bright in step N of runs with float16 weights. After
each run all ranks compare the weights that they compute with.
"""

import os
import shlex
import sys

import torch
from torch import Tensor

from partial_fc import comm
from partial_fc.models.inputs import MNIST, InputContract
from partial_fc.train.job import Job, Outcome
from partial_fc.train_command import exit_now
from recipes import mnist


class TooBright(InputContract):
    """MNIST's input; in one step, on one rank, a million times as bright."""

    world: comm.World
    step = -1

    def __call__(self, pixel_B: Tensor) -> Tensor:
        return super().__call__(pixel_B) * (1e6 if self.world.step == TooBright.step else 1)


def main(runs: list[str]) -> None:
    world = comm.init("cpu")
    end = world.close
    world.close = lambda: None  # type: ignore[method-assign]
    comm.init = lambda *_, **__: world
    train, TooBright.world = mnist.train, world

    def train_and_compare(job: Job) -> Outcome:
        here = world.rank == 1 and job.backbone.precision.mode == "fp16-o2"
        TooBright.step = int(os.environ.get("OVERFLOW_AT", -1)) if here else -1
        outcome = train(job)
        local = torch.cat([p.detach().double().flatten() for p in job.backbone.module.parameters()])
        all_W = world.all_gather(local.unsqueeze(0), name="test/weights")
        assert all(torch.equal(local, other) for other in all_W), "the replicas have parted"
        return outcome

    mnist.MNIST, mnist.train = TooBright(MNIST.description, MNIST.mean, MNIST.std), train_and_compare  # type: ignore[attr-defined]
    for flags in runs:
        assert mnist.main(shlex.split(flags)) == 0
    end()


if __name__ == "__main__":
    main(sys.argv[1:])
    exit_now(0)
