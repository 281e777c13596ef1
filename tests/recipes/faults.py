"""Faults that tests put into a run, by what they say on the last rank.

FAULTS, separated by spaces:
    nan@STEP[,TIMES]     its features are NaN in that step, the first TIMES (1) times that the step is made
    bit@STEP             after that step a weight of its backbone has another last bit
    stall@STEP           it never makes that step
    impatient            every rank asks a server that is gone three times within 10 ms
"""

import time
from collections import Counter

import torch

from partial_fc.data.sets import ranges
from partial_fc.train import loop
from partial_fc.train import update as updates

forward_backward, update, WAITS_S = updates.forward_backward, loop.update, ranges.WAITS_S


def put_in(faults: str, is_last: bool) -> None:
    """From now on, in place of those of the run before."""
    left: dict[str, Counter[int]] = {kind: Counter() for kind in ("nan", "bit", "stall")}
    ranges.WAITS_S = (0.0, 0.01) if "impatient" in faults else WAITS_S
    for fault in set(faults.split()) - {"impatient"}:
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
        if due("stall", job.at.step + 1) and is_last:
            time.sleep(1000)
        loss = update(job, *arguments)
        if due("bit", job.at.step + 1) and is_last:
            weight = next(job.backbone.module.parameters()).data
            weight[(0,) * weight.dim()].view(torch.int32).bitwise_xor_(1)
        return loss

    updates.forward_backward, loop.update = faulty_forward_backward, faulty_update
