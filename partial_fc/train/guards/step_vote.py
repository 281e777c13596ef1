"""The vote of all ranks in a step: one small all-reduce that overlaps with it."""

from dataclasses import dataclass

import torch

from partial_fc.checkpoint import Saver
from partial_fc.comm import Work, World


@dataclass(frozen=True)
class Votes:
    """The result of a vote, equal on all ranks. stop: the exit status if any rank wants to stop, else 0; and whether
    any is busy with a checkpoint, failed to write it, has lost its folder to another run, or was notified of changed
    hosts."""

    stop: int
    busy: bool
    failed: bool
    lost: bool = False
    hosts_changed: bool = False


class StepVote:
    """A vote from start(), where a step begins, to result(), where it ends: the step's other collectives imply that
    every rank has voted by then, so result() does not wait."""

    def __init__(self, world: World):
        self._world = world
        self._pending: Work | None = None

    def start(self, stop: int, saver: Saver, hosts_changed: bool = False) -> None:
        votes = torch.tensor([stop, saver.busy, saver.failed, saver.lost is not None, hosts_changed], dtype=torch.int32)
        self._pending = self._world.start_all_reduce(votes, "max", name="train/vote")

    def result(self) -> Votes:
        assert self._pending is not None, "start() comes first"
        votes, self._pending = self._pending.wait(), None
        stop, *others = votes.tolist()
        return Votes(stop, *map(bool, others))
