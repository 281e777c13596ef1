"""The gain of --compile: updates of a backbone with and without, in turn in one process.

    python -m benchmarks.compile_gain mini timm:vit_tiny_patch16_224 r18 [--batch-size 32] [--rounds 3]

An update is forward, backward and AdamW, in fp32, of made-up images, without head and loader. Seconds are CPU time of
one thread, which other load on the machine changes less than wall time. Compiling is timed by the wall, and in CPU
time with that of the compiler's processes.
"""

import resource
import time
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import tyro

from partial_fc import models
from partial_fc.comm import SingleWorld
from partial_fc.models import encoders
from partial_fc.optim import backbone as optimizers
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.precision import Precision

WIDTH = 128


@dataclass(frozen=True)
class Options:
    """Updates backbones with and without --compile in turn; prints a line for each."""

    networks: tyro.conf.Positional[tuple[str, ...]]
    """Values of --network."""
    image_size: int = 64
    """Pixels of a side; mini's are the demo's 40."""
    batch_size: int = 32
    """Images of an update."""
    updates: int = 6
    """Updates of each side in a round, after one that does not count."""
    rounds: int = 3
    """Rounds."""


def build(network: str, size: int) -> TorchBackbone:
    torch.manual_seed(0)
    module = models.build(network, WIDTH, size)
    optimizer = partial(optimizers.build, "adamw", momentum=0.9, weight_decay=0.05)
    precision = Precision("fp32", torch.device("cpu"))
    to_input = encoders.input_of(module)
    return TorchBackbone(module, SingleWorld(), precision, optimizer, to_input, {})


def update_s(backbone: TorchBackbone, pixel_B: torch.Tensor) -> float:
    """Returns the CPU time of an update."""
    began = time.process_time()
    backbone.zero(len(pixel_B))
    backbone.name_samples(torch.arange(len(pixel_B)))
    output_BD = backbone.forward(pixel_B)
    backbone.backward(torch.full_like(output_BD, 1e-3))
    backbone.wait()
    backbone.step(1e-4)
    return time.process_time() - began


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(1)
    for network in options.networks:
        size = 40 if network == "mini" else options.image_size
        pixel_B = torch.randint(0, 256, (options.batch_size, 3, size, size), dtype=torch.uint8)
        plain, compiled = build(network, size), build(network, size)
        for one in (plain, compiled):
            one.train()
        wall, cpu = time.perf_counter(), cpu_s()
        if why := compiled.compile(pixel_B):
            raise ValueError(f"{network} is not compiled: {why}")
        wall, cpu = time.perf_counter() - wall, cpu_s() - cpu
        print(f"{network}: compiled in {wall:.0f} s, {cpu:.0f} s of CPU time", flush=True)
        ratios, rates = [], []
        for _ in range(options.rounds):
            pairs = [(update_s(plain, pixel_B), update_s(compiled, pixel_B)) for _ in range(options.updates + 1)][1:]
            seconds = [median(side) for side in zip(*pairs, strict=True)]
            rates.append([options.batch_size / one for one in seconds])
            ratios.append(seconds[0] / seconds[1])
        without, with_it = (median(side) for side in zip(*rates, strict=True))
        print(f"{network}, {size} pixels: {without:.1f} images/s, compiled {with_it:.1f}: {median(ratios):.2f} "
              f"({min(ratios):.2f} to {max(ratios):.2f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
