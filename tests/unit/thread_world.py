"""Several ranks as threads of one process: worlds of any size, one after the other, without a launcher."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from partial_fc.comm.launch.detect import Launch
from partial_fc.comm.world import Op, World

T = TypeVar("T")


class Meeting:
    """Where the threads of one world meet."""

    def __init__(self, size: int, seconds: float = 60, met: Callable[[], None] | None = None):
        """seconds: who waits longer waits for ever. met: is called whenever all are there."""
        self.size = size
        self.barrier = threading.Barrier(size, met, seconds)
        self.brought: list[Any] = [None] * size


class ThreadWorld(World):
    """A collective is done where it is started; all ranks start them in the same order."""

    backend = "single"

    def __init__(self, rank: int, meeting: Meeting):
        super().__init__(Launch("single", rank, meeting.size, rank, meeting.size))
        self.meeting = meeting

    def _all(self, mine: Any) -> list[Any]:
        meeting = self.meeting
        meeting.brought[self.rank] = mine
        meeting.barrier.wait()
        found = list(meeting.brought)
        meeting.barrier.wait()
        return found

    def _all_reduce(self, t: Tensor, op: Op, name: str) -> Callable[[], Tensor]:
        stacked = torch.stack(self._all(t.clone()))
        t.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))
        return lambda: t

    def _all_gather(self, t: Tensor, rows: Sequence[int] | None, name: str) -> Callable[[], Tensor]:
        found = torch.cat(self._all(t))
        return lambda: found

    def _reduce_scatter(self, t: Tensor, rows: Sequence[int], name: str) -> Callable[[], Tensor]:
        found = torch.stack(self._all(t)).sum(0).split(list(rows))[self.rank]
        return lambda: found

    def _all_to_all(self, t: Tensor, rows: Sequence[int], arriving: Sequence[int], name: str) -> Callable[[], Tensor]:
        found = [blocks[self.rank] for blocks in self._all(t.split(list(rows)))]
        assert [len(block) for block in found] == list(arriving)
        return lambda: torch.cat(found)

    def _broadcast(self, t: Tensor, root: int, name: str) -> Callable[[], Tensor]:
        found = self._all(t)[root].clone()
        return lambda: found

    def _leave(self) -> None:
        pass


def in_world(size: int, act: Callable[[ThreadWorld], T], meeting: Meeting | None = None) -> list[T]:
    """act(world) in every rank of a world of `size`; what each returned, by rank. Raises what the first one raised."""
    meeting = meeting or Meeting(size)

    def of_rank(rank: int) -> T:
        try:
            return act(ThreadWorld(rank, meeting))
        except BaseException:
            meeting.barrier.abort()  # the others would wait
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(of_rank, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    raised = [e for e in errors if e is not None]
    first = [e for e in raised if not any(isinstance(x, threading.BrokenBarrierError) for x in (e, e.__cause__))]
    for error in first or raised:
        raise error
    return [future.result() for future in futures]
