"""How long a checkpoint holds training up, and what it costs while it is written.

    python -m benchmarks.checkpoint_pause --classes 500000 --dir DIR

One process with a head whose rows were all made, SGD with momentum, no backbone, which keeps the memory that it frees
as training does. In turn: steps alone; a checkpoint as
training takes it (behind: copied and written in the background) and the steps beside it until it is on the disk; one
that is copied at once and written in the background; one that is written before the next step. Printed: medians over
the rounds, one JSON line. first_step: the one after the checkpoint; extra: what all steps beside it took more than as
many alone.
"""

import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import tyro

from partial_fc import checkpoint
from partial_fc.comm import SingleWorld
from partial_fc.head import CosFace, PartialFC
from partial_fc.memory import keep_freed


@dataclass(frozen=True)
class Options:
    """Times checkpoints of a head in the background and in the foreground."""

    classes: int = 500_000
    """Classes of the process."""
    dim: int = 512
    """Width of a centre."""
    batch: int = 128
    """Images of a step."""
    sample_rate: float = 0.1
    """Share of the classes that are negatives in a step."""
    rounds: int = 5
    """Checkpoints of each kind."""
    dir: Path | None = None
    """Folder on the disk that is to be measured; none: a temporary one."""


def measure(options: Options, root: Path) -> dict[str, float]:
    """Medians: seconds of a step alone and beside the writing, of the pauses, of the writing; bytes."""
    head = PartialFC(options.classes, options.dim, CosFace(), options.sample_rate)
    head.centres  # noqa: B018 - makes all rows
    head.row_state()["momentum"].normal_()
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {}

    def step(kind: str) -> float:
        feat = torch.randn(options.batch, options.dim, generator=generator).requires_grad_()
        label = torch.randint(options.classes, (options.batch,), generator=generator)
        began = time.perf_counter()
        head(feat, label).backward()
        head.step(0.1)
        times.setdefault(kind, []).append(time.perf_counter() - began)
        return times[kind][-1]

    def save(kind: str, copy: bool = True, behind: bool = False) -> None:
        began = time.perf_counter()
        taken = checkpoint.capture(head.num_steps, {}, {}, {}, head, {}, world=head.world, copy=copy, behind=behind)
        saver.begin(taken, began)
        times.setdefault(f"pause_{kind}_s", []).append(time.perf_counter() - began)
        beside = []
        while saver.busy:
            beside.append(step(f"step_beside_{kind}_s"))
        if beside:
            times.setdefault(f"first_step_{kind}_s", []).append(beside[0])
            times.setdefault(f"extra_{kind}_s", []).append(sum(beside) - len(beside) * median(times["step_s"]))
        times.setdefault(f"written_{kind}_s", []).append(time.perf_counter() - began)
        saver.drain()

    saver = checkpoint.Saver(root, SingleWorld(), keep=1)
    for kind in ("warm-up", *["step_s"] * 5 * options.rounds):
        step(kind)
    for _ in range(options.rounds):
        save("behind", behind=True)
        step("step_s")
        save("at_once")
        step("step_s")
        save("foreground", copy=False)
        step("step_s")
    times.pop("warm-up")
    saver.close()
    files = checkpoint.newest(root)
    assert files is not None
    size = sum(path.stat().st_size for path in files.iterdir())
    return {name: round(median(seconds), 4) for name, seconds in times.items()} | {"bytes": size}


def main(options: Options) -> None:
    """Prints what was measured."""
    keep_freed()
    root = Path(tempfile.mkdtemp(prefix="checkpoint-pause-", dir=options.dir))
    try:
        found = measure(options, root)
    finally:
        shutil.rmtree(root)
    print(json.dumps({**asdict(options), **found}, default=str))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
