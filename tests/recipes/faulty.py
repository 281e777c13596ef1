"""Recipe `face` with faults put in, several runs in one launch: `python -m tests.recipes.faulty "FAULTS | FLAGS" ...`.

FAULTS, separated by spaces, on the last rank:
    nan@STEP[,TIMES]     its features are NaN in that step, the first TIMES (1) times that the step is made
    bit@STEP             after that step a weight of its backbone has another last bit
    spike@STEP           the loss of that step is 100 more, on all ranks
Every rank prints "rank R ended with: " and the exit status of the run, or the error that ended it.
"""

import shlex
import sys
from collections import Counter

import torch

from partial_fc import comm
from partial_fc.train import loop
from partial_fc.train import update as updates
from partial_fc.train.guards import loss_spikes
from recipes import face

forward_backward, update = updates.forward_backward, loop.update


def put_in(faults: str, is_last: bool) -> None:
    """From now on, in place of those of the run before."""
    left: dict[str, Counter[int]] = {kind: Counter() for kind in ("nan", "bit", "spike")}
    for fault in faults.split():
        kind, _, where = fault.partition("@")
        step, _, times = where.partition(",")
        left[kind][int(step)] = int(times or 1)

    def due(kind: str, step: int) -> bool:
        left[kind][step] -= 1
        return left[kind][step] >= 0

    def faulty_forward_backward(job, *arguments):
        hooks = []
        if due("nan", job.at.step + 1) and is_last:
            hooks.append(job.backbone.module.register_forward_hook(lambda _module, _input, output: output * torch.nan))
        try:
            forward_backward(job, *arguments)
        finally:
            for hook in hooks:
                hook.remove()

    def faulty_update(job, *arguments):
        loss = update(job, *arguments)
        if due("bit", job.at.step + 1) and is_last:
            weight = next(job.backbone.module.parameters()).data
            weight[(0,) * weight.dim()].view(torch.int32).bitwise_xor_(1)
        return loss + 100 * due("spike", job.at.step + 1)

    updates.forward_backward, loop.update = faulty_forward_backward, faulty_update  # type: ignore[assignment]


def main(runs: list[str]) -> None:
    world = comm.init("cpu")
    end = world.close
    world.close = lambda: None  # type: ignore[method-assign]
    comm.init = lambda *_, **__: world
    loss_spikes.LEAST = 8
    for run in runs:
        faults, _, flags = run.partition("|")
        put_in(faults, is_last=world.rank == world.size - 1)
        try:
            ended = str(face.main(shlex.split(flags)))
        except (ValueError, FloatingPointError) as error:
            ended = f"{type(error).__name__}: {error}"
        print(f"rank {world.rank} ended with: {ended}\n", end="", flush=True)
    end()


if __name__ == "__main__":
    main(sys.argv[1:])
