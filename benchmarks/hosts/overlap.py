"""How much of the backbone's gradient exchange hides behind its backward.

    torchrun --standalone --nproc_per_node=2 -m benchmarks.hosts.overlap --network tiny --batch-size 64
    horovodrun -np 2 -H localhost:2 python -m benchmarks.hosts.overlap
    python -m benchmarks.hosts.two_hosts --rate 1gbit horovodrun -np 2 -H 10.77.0.1:1,10.77.0.2:1 \\
        --network-interfaces eth0 --disable-cache .venv/bin/python -m benchmarks.hosts.overlap        over a slow link

Three steps in turn, each forward and backward of the same backbone on the same images: without any exchange; with all
of it after backward; with it beside backward, as training does. hidden = (after - beside) / (after - without): 1 where
the exchange costs nothing, 0 where nothing is gained, below 0 where the exchange disturbs the computing more than it
saves. On a CPU the exchange needs the cores that compute, so it can hide only as far as it waits for the network.
"""

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

import torch
import tyro
from torch import Tensor, nn

from partial_fc import comm, models
from partial_fc.comm import World
from partial_fc.optim.gradient_sync import GradientSync, broadcast_module
from partial_fc.verbs.plan.counts import synchronise


@dataclass(frozen=True)
class Options:
    """Measures how much of the gradient exchange hides behind backward; rank 0 prints one JSON line."""

    network: Literal["r18", "r34", "r50", "r100", "r200", "mbf", "tiny"] = "tiny"
    """Backbone."""
    embedding_size: int = 128
    """Width of a feature."""
    image_size: int = 40
    """Pixels."""
    batch_size: int = 64
    """Images of one process."""
    bucket_bytes: int | None = None
    """Gradients leave in parts of this size; none: as training does."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the backbone computes."""
    steps: int = 30
    """Timed steps of each kind, after three that are not."""
    threads: int = 1
    """Threads of each process on a CPU."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"--steps is {self.steps}; expected at least 1")


WARM_UP = 3  # steps
KINDS = ("without", "after", "beside")


def main() -> None:
    """ValueError for one process: it exchanges nothing."""
    options = tyro.cli(Options)
    world = comm.init(options.device)
    if world.size == 1:
        raise ValueError("one process exchanges nothing; start two, for example with torchrun (see --help)")
    device = torch.device("cuda", world.local_rank) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(options.threads)
    steps = _steps(options, world, device)
    seconds_K: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(WARM_UP + options.steps):
        for kind, step in steps.items():
            world.barrier(name="overlap/start")
            started = time.perf_counter()
            step()
            synchronise(device)
            mine = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
            slowest = world.all_reduce(mine, "max", name="overlap/seconds").item()
            if turn >= WARM_UP:
                seconds_K[kind].append(slowest)
    if world.rank == 0:
        without, after, beside = (median(seconds_K[kind]) for kind in KINDS)
        exchange = after - without
        line = {
            **asdict(options),
            "world_size": world.size,
            "backend": world.backend,
            "without_s": round(without, 4),
            "after_s": round(after, 4),
            "beside_s": round(beside, 4),
            "exchange_s": round(exchange, 4),
            # Noise can be larger than an exchange that costs next to nothing: then there is no share to name.
            "hidden": round((after - beside) / exchange, 3) if exchange > 0 else None,
            "gradient_bytes": sum(p.numel() * p.element_size() for p in _backbone(options).parameters()),
            "torch": torch.__version__,
        }
        print(json.dumps(line), flush=True)
    world.barrier(name="overlap/end")
    world.close()


def _backbone(options: Options) -> nn.Module:
    torch.manual_seed(0)
    return models.build(options.network, options.embedding_size, options.image_size)


def _steps(options: Options, world: World, device: torch.device) -> dict[str, Callable[[], None]]:
    """A function for each of KINDS. Each has a backbone of its own: a GradientSync stays with its module."""
    backbone = _backbone(options).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    broadcast_module(backbone, world)
    generator = torch.Generator().manual_seed(world.rank)
    shape = (options.batch_size, 3, options.image_size, options.image_size)
    image_B3HW = torch.randn(shape, generator=generator).to(device, memory_format=torch.channels_last)
    slope_BD = torch.randn(options.batch_size, options.embedding_size, generator=generator).to(device)

    def compute(module: nn.Module) -> None:
        feat_BD: Tensor = module(image_B3HW)
        feat_BD.backward(slope_BD)

    def without(module: nn.Module) -> Callable[[], None]:
        def step() -> None:
            module.zero_grad(set_to_none=False)
            compute(module)

        return step

    def exchanging(module: nn.Module, overlap: bool) -> Callable[[], None]:
        sync = GradientSync(module, world, options.bucket_bytes, overlap=overlap)

        def step() -> None:
            sync.zero()
            compute(module)
            sync.wait()

        return step

    return {
        "without": without(copy.deepcopy(backbone)),
        "after": exchanging(copy.deepcopy(backbone), overlap=False),
        "beside": exchanging(copy.deepcopy(backbone), overlap=True),
    }


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"overlap: {error}")
