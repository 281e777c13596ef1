"""The vote of all ranks in a step, in one small all-reduce that hides behind it."""

from dataclasses import dataclass

import torch

from partial_fc.checkpoint import Saver
from partial_fc.comm import Work, World


@dataclass(frozen=True)
class StepVerdict:
    """Equal on all ranks. stop: the exit status where any of them wants to stop, else 0; whether any is busy with a
    checkpoint, could not write it, found its folder to be another run's, was told of hosts that come or go."""

    stop: int
    busy: bool
    failed: bool
    lost: bool = False
    hosts_changed: bool = False


class StepVote:
    """start() where a step begins, result() where it ends: by then every rank has said its part long ago, as the step's
    other collectives needed it, so nobody waits."""

    def __init__(self, world: World):
        self._world = world
        self._pending: Work | None = None

    def start(self, stop: int, saver: Saver, hosts_changed: bool = False) -> None:
        said = torch.tensor([stop, saver.busy, saver.failed, saver.lost is not None, hosts_changed], dtype=torch.int32)
        self._pending = self._world.start_all_reduce(said, "max", name="train/vote")

    def result(self) -> StepVerdict:
        assert self._pending is not None, "start() comes first"
        said, self._pending = self._pending.wait(), None
        stop, *others = said.tolist()
        return StepVerdict(stop, *map(bool, others))
