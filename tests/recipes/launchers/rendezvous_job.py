"""Recipe `mnist`, and a sum over the ranks, with the flags of a rendezvous: `partial-fc train PATH ...`."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import tyro

from partial_fc.comm.launch import start
from partial_fc.flags import Flags, LaunchFlags
from recipes.imagenet.rendezvous.start import RendezvousFlags, start_shard


@dataclass(frozen=True, kw_only=True)
class Sum:
    launch: Flags[LaunchFlags] = LaunchFlags()
    rendezvous: Flags[RendezvousFlags] = RendezvousFlags()
    stop: int = -1
    """This rank is stopped before the second sum."""
    until: Path | None = None
    """Waits for this file before the end."""


def main(arguments: list[str]) -> int:
    if "--data-dir" in arguments:
        return train(arguments)
    job = tyro.cli(Sum, args=arguments)
    status = start.start(job.launch, partial(start_shard, job.rendezvous))
    if status is not None:
        return status
    world = start.join(job.launch, "cpu")
    total = world.all_reduce(torch.tensor([1 + world.rank]), name="sum").item()
    print(f"rank {world.rank} of {world.size}, {world.local_rank} of {world.local_size} here: {total}", flush=True)
    if world.rank == job.stop:
        os.kill(os.getpid(), signal.SIGSTOP)
    while job.until and not job.until.exists():
        time.sleep(0.05)
    world.barrier(name="after")
    world.close()
    return 0


def train(arguments: list[str]) -> int:
    # Imported here: what only adds up starts sooner without.
    from partial_fc.train.begin.start import launch
    from partial_fc.train.run import run_recipe
    from recipes.mnist import main as mnist

    @dataclass(frozen=True, kw_only=True)
    class Config(mnist.Config):
        rendezvous: Flags[RendezvousFlags] = RendezvousFlags()

    config = tyro.cli(Config, args=arguments)
    status = launch(config, first=partial(start_shard, config.rendezvous))
    return run_recipe("mnist", config, [], mnist.train_here, bare=True) if status is None else status


if __name__ == "__main__":
    from partial_fc.verbs.train import exit_now

    exit_now(main(sys.argv[1:]))
