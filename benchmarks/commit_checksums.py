"""What the checksums of commits in memory cost.

    python -m benchmarks.commit_checksums --classes 100000 300000 1000000

One process with a head whose rows were all made, SGD with momentum, rate 0.1, no backbone, which would make the steps
longer. A commit's bytes are copied once, and as many come from another rank; both copies make their CRC. Measured in
turn: a step, a copy of the centres without CRC (the C library's memmove, which is faster than torch's copy) and with
it. Printed: medians, one JSON line for each number of classes; share: what the CRCs of a commit take, of the steps
between two commits.
"""

import ctypes
import json
import time
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
import tyro

from partial_fc.checkpoint import crc32
from partial_fc.head import Compute, CosFace, PartialFC
from partial_fc.head.rows import Storage


@dataclass(frozen=True)
class Options:
    """Times copies with and without checksums."""

    classes: tuple[int, ...] = (100_000, 300_000, 1_000_000)
    """Classes of the process."""
    dim: int = 512
    """Width of a centre."""
    batch: int = 128
    """Images of a step."""
    storage: Literal["float32", "bfloat16"] = "float32"
    """Of centres and momentum."""
    every: int = 100
    """Steps from one commit to the next."""
    rounds: int = 5
    """Of each kind."""


def measure(options: Options, classes: int) -> dict[str, float]:
    """Seconds."""
    storage = Storage(getattr(torch, options.storage))
    head = PartialFC(classes, options.dim, CosFace(), 0.1, device=Compute(precision="auto"), storage=storage)
    source = crc32.as_bytes(head.centres)
    target = torch.zeros_like(source)
    num_bytes = sum(t.nbytes for t in head.row_state().values())
    steps: list[float] = []
    plain: list[float] = []
    checked: list[float] = []
    for number in range(options.rounds + 1):
        feat = torch.randn(options.batch, options.dim).requires_grad_()
        label = torch.randint(classes, (options.batch,))
        began = time.perf_counter()
        head(feat, label).backward()
        head.step(0.1)
        stepped = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), len(source))
        copied = time.perf_counter()
        crc32.copy(source, target)
        ended = time.perf_counter()
        if number:  # the first one warms up
            for times, seconds in ((steps, stepped - began), (plain, copied - stepped), (checked, ended - copied)):
                times.append(seconds)
    extra = 2 * (median(checked) - median(plain)) * num_bytes / len(source)
    return {
        "classes": classes,
        "commit_mb": round(num_bytes / 1e6, 1),
        "step_s": round(median(steps), 4),
        "copy_gb_s": round(len(source) / 1e9 / median(plain), 2),
        "checked_copy_gb_s": round(len(source) / 1e9 / median(checked), 2),
        "checksums_s": round(extra, 4),
        "share": round(extra / (options.every * median(steps)), 5),
    }


def main(options: Options) -> None:
    """Prints what was measured."""
    for classes in options.classes:
        print(json.dumps(measure(options, classes)), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
