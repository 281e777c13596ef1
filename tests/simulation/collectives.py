"""What stands for `horovod.torch`: collectives between simulated processes, and how they fail.

As Horovod's over Gloo: matched by name, in the background; a collective that all ranks have started ends on each of
them at a moment of its own, or, where a rank is lost then, on some only. A rank that is lost is noticed at once or
after SILENT_S, by each of the others for itself, and whoever notices leaves, which the others notice in turn. An `init`
in which not all come ends the process.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from partial_fc.comm.elastic import membership

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster, Process

SILENT_S = 8.0
ABORTED = 134


@dataclass(eq=False)
class Handle:
    """A collective of one rank."""

    call: "Call"
    given: Tensor
    more: Any = None
    result: Any = None
    error: str = ""
    done: bool = False
    waiting: Any = None


@dataclass(eq=False)
class Call:
    """A collective of all ranks."""

    kind: str
    name: str
    handles: dict[int, Handle] = field(default_factory=dict)
    is_under_way: bool = False


class Communicator:
    """The ranks that have met in one `init`."""

    def __init__(self, number: int, members: Sequence["Process"], cluster: "Cluster"):
        self.number, self.members, self.cluster = number, list(members), cluster
        self.broken: dict[int, str] = {}
        self._counts: list[Counter[str]] = [Counter() for _ in members]
        self._calls: dict[tuple[str, int], Call] = {}

    def start(self, process: "Process", kind: str, t: Tensor, name: str, more: Any = None) -> Handle:
        rank = self.members.index(process)
        self._counts[rank][name] += 1
        key = name, self._counts[rank][name]
        call = self._calls.setdefault(key, Call(kind, name))
        assert call.kind == kind, f"{name}: one rank calls {call.kind}, another {kind}"
        handle = call.handles[rank] = Handle(call, t, more)
        if rank in self.broken:
            self._fail(handle, self.broken[rank])
        else:
            self._try(key)
        return handle

    def retry(self) -> None:
        """After hosts can be reached again."""
        for key in list(self._calls):
            self._try(key)

    def lose(self, rank: int, is_gone: bool) -> None:
        """A member has ended (is_gone), or is silent from now on."""
        clock = self.cluster.clock
        for other, process in enumerate(self.members):
            if other == rank or other in self.broken:
                continue
            soon = is_gone and clock.random.random() < 0.5
            delay = clock.random.random() * 0.1 if soon else SILENT_S + clock.random.random()
            clock.call(delay, lambda other=other: self._notice(other, rank), process)

    def leave(self, rank: int) -> None:
        """A member shuts down. What all have started comes to its end."""
        was_broken = rank in self.broken
        self.broken[rank] = "Horovod has been shut down"
        for other, process in enumerate(self.members):
            if other not in self.broken:
                delay = self.cluster.clock.random.random() * 0.05
                if was_broken and self.cluster.clock.random.random() < 0.3:
                    delay += SILENT_S
                self.cluster.clock.call(delay, lambda other=other: self._break(other, "another rank has left"), process)

    def _notice(self, rank: int, lost: int) -> None:
        if not self.cluster.talk(self.members[rank], self.members[lost]):
            self._break(rank, f"connection to rank {lost} is lost")

    def _break(self, rank: int, why: str) -> None:
        if rank in self.broken:
            return
        self.broken[rank] = why
        for call in list(self._calls.values()):
            handle = call.handles.get(rank)
            # What is on its way may come yet, where the one who left had all of it.
            if handle and not handle.done and not (call.is_under_way and "left" in why):
                self._fail(handle, why)
        self.lose(rank, is_gone=True)

    def _fail(self, handle: Handle, why: str) -> None:
        handle.error, handle.done = why, True
        if handle.waiting:
            self.cluster.clock.wake(handle.waiting)

    def _try(self, key: tuple[str, int]) -> None:
        call = self._calls.get(key)
        size = len(self.members)
        if call is None or call.is_under_way or len(call.handles) < size:
            return
        first = self.members[0]
        if not all(self.cluster.talk(first, p) for p in self.members):
            return
        if any(rank in self.broken for rank in range(size)):
            return
        call.is_under_way = True
        results = _compute(call, size)
        clock = self.cluster.clock
        left = set(range(size))

        def arrive(rank: int) -> None:
            handle = call.handles[rank]
            if not handle.done:
                handle.result, handle.done = results[rank], True
                if call.kind.startswith("reduce"):
                    handle.given.copy_(results[rank])
                    handle.result = handle.given
                if handle.waiting:
                    clock.wake(handle.waiting)
            left.discard(rank)
            if not left:
                self._calls.pop(key, None)

        for rank, process in enumerate(self.members):
            clock.call(self.cluster.latency(), lambda rank=rank: arrive(rank), process)


def _compute(call: Call, size: int) -> list[Tensor]:
    """What each rank gets."""
    given = [call.handles[rank].given.clone() for rank in range(size)]
    more = [call.handles[rank].more for rank in range(size)]
    if call.kind in ("reduce sum", "reduce max"):
        assert len({(t.shape, t.dtype) for t in given}) == 1, f"{call.name}: {[t.shape for t in given]}"
        stacked = torch.stack(given)
        return [stacked.sum(0) if call.kind == "reduce sum" else stacked.amax(0)] * size
    if call.kind == "gather":
        return [torch.cat(given)] * size
    if call.kind == "broadcast":
        assert len(set(more)) == 1, f"{call.name}: roots {more}"
        return [given[more[0]]] * size
    parts = [t.split(rows) for t, rows in zip(given, more, strict=True)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(size)]


class Horovod:
    """`import horovod.torch as hvd`, in whichever process it is used."""

    Sum, Max = "sum", "max"

    def __init__(self, cluster: "Cluster"):
        self._cluster = cluster
        self.mpi_ops = type("mpi_ops", (), {"_handle_map": {}})
        # By driver and how often it has emptied its store: rank -> (process, size).
        self._meetings: dict[tuple[int, int], dict[int, tuple[Process, int]]] = {}
        self._num_worlds = 0

    def init(self) -> None:
        cluster, clock, me = self._cluster, self._cluster.clock, self._cluster.here
        rank, size = map(int, membership._member.store.assignment.split(b",")[:2])
        driver = cluster.driver_of(me)
        deadline = clock.now + SILENT_S
        clock.sleep(cluster.latency())
        if not driver.answers(me):
            cluster.end(me, ABORTED, "hvd.init: no store")
            clock.park()
        meeting = self._meetings.setdefault((driver.number, driver.store.generation), {})
        meeting[rank] = me, size
        while me.comm is None:
            there = [meeting.get(r, (None, 0)) for r in range(size)]
            members = [process for process, its_size in there if process is not None and its_size == size]
            if len(members) == size and me in members and all(cluster.talk(me, p) for p in members):
                self._num_worlds += 1
                comm = Communicator(self._num_worlds, members, cluster)
                for process in members:
                    process.comm = comm
                cluster.oracle.met(comm, driver)
                break
            if not clock.park(min(deadline, clock.now + 0.1)) and clock.now >= deadline:
                cluster.trace(f"hvd.init waits in vain: {len(members)} of {size}")
                cluster.oracle.waited_in_vain(deadline - SILENT_S)
                cluster.end(me, ABORTED, "hvd.init: not all have come")
                clock.park()
        clock.sleep(cluster.latency())

    def shutdown(self) -> None:
        me, clock = self._cluster.here, self._cluster.clock
        comm, me.comm = me.comm, None
        if comm is None:
            return
        rank = comm.members.index(me)
        silent = rank not in comm.broken and not all(self._cluster.talk(me, p) for p in comm.members)
        comm.leave(rank)
        clock.sleep(clock.random.random() * (SILENT_S if silent else 0.05))

    def rank(self) -> int:
        return self._cluster.here.comm.members.index(self._cluster.here)

    def size(self) -> int:
        return len(self._cluster.here.comm.members)

    def gloo_enabled(self) -> bool:
        return True

    def allgather(self, t: Tensor, name: str) -> Tensor:
        return self.synchronize(self.allgather_async(t, name))

    def allreduce_async_(self, t: Tensor, name: str, op: str) -> Handle:
        return self._start(f"reduce {op}", t, name)

    def allgather_async(self, t: Tensor, name: str) -> Handle:
        return self._start("gather", t, name)

    def alltoall_async(self, t: Tensor, splits: Tensor, name: str) -> Handle:
        return self._start("exchange", t, name, splits.tolist())

    def broadcast_async(self, t: Tensor, root: int, name: str) -> Handle:
        return self._start("broadcast", t, name, root)

    def _start(self, kind: str, t: Tensor, name: str, more: Any = None) -> Handle:
        me = self._cluster.here
        if me.comm is None:
            raise ValueError("Horovod has not been initialized; use hvd.init().")
        return me.comm.start(me, kind, t, name, more)

    def synchronize(self, handle: Handle) -> Any:
        clock = self._cluster.clock
        while not handle.done:
            handle.waiting = clock.task
            clock.park()
        handle.waiting = None
        if handle.error:
            raise HorovodInternalError(handle.error)
        return (handle.result, None) if handle.call.kind == "exchange" else handle.result
