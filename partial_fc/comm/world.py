"""The World and its collectives, named, checked and counted here; the backends only move tensors.

torch is imported by the functions that compute, so that the command line starts fast.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from partial_fc.comm.launch.detect import Launch
from partial_fc.comm.watch.board import Endpoint
from partial_fc.comm.watch.watchdog import Call, Journal, Watch

if TYPE_CHECKING:
    from torch import Tensor

Op = Literal["sum", "max"]
_REDUCIBLE = ("torch.float16", "torch.float32", "torch.float64", "torch.int32", "torch.int64")


@dataclass
class Traffic:
    """The calls and payload bytes of this rank, by the collective's name."""

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def per_step(self, num_steps: int) -> dict[str, dict[str, float]]:
        """Returns average calls and bytes of a step, by name."""
        return {
            name: {"calls": calls / num_steps, "bytes": self.num_bytes[name] / num_steps}
            for name, calls in self.calls.items()
        }


class CollectiveError(RuntimeError):
    """The backend gave a collective up: a rank has ended, or the ranks disagreed on it. The message has the collective,
    the step, this rank, and the others' states; __cause__ is the backend's error."""


class OtherRankFailed(Exception):
    """Another rank has failed in a block of `comm.all_or_none`."""


@dataclass(eq=False)
class Work:
    """A collective in flight. `wait` returns its result; the input must not be written to before that."""

    _world: World
    _call: Call
    _finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Returns the result. Raises CollectiveError if the backend gives up."""
        world, call = self._world, self._call
        started = time.perf_counter()
        call.waited_s = -1.0
        world.journal.in_flight.add(call)
        try:
            result = self._finish()
        except RuntimeError as error:
            raise world.failure(call, error) from error
        if result.is_cuda and world.runs_ahead:
            # The host continues, and blocks only at the next tensor that it reads: the call stays in flight.
            import torch

            event = torch.cuda.Event()
            event.record()
            call.done = event.query
        else:
            world.journal.in_flight.discard(call)
        world.seconds_waiting += time.perf_counter() - started
        return result


class World(ABC):
    """This process among the ranks of its run.

    Every collective must be called by all ranks, with the same name; those of one name follow one another. Reductions
    are sums or maxima, never means, so that only the loss divides.
    """

    backend: Literal["horovod", "torch", "single"]
    # Whether an all-gather without row counts exchanges them first, and waits for them.
    asks_for_counts: ClassVar[bool] = False

    def __init__(self, launch: Launch):
        self.rank = launch.rank
        self.size = launch.size
        self.local_rank = launch.local_rank
        self.local_size = launch.local_size
        self.traffic = Traffic()  # since the start
        self.seconds_waiting = 0.0  # since the start: time spent waiting
        self.journal = Journal(launch.rank, launch.size, self.backend)
        self._watch: Watch | None = None
        self.contained = ""  # the name of a block of `comm.all_or_none`

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.backend})"

    @property
    def step(self) -> int:
        """The current update, from 1, for reports; set by the training loop."""
        return self.journal.step

    @step.setter
    def step(self, step: int) -> None:
        self.journal.step = step

    @property
    def runs_ahead(self) -> bool:
        """Returns whether waiting for a collective only orders work on the GPU, and the watchdog tracks its end."""
        return self.backend == "torch" and self._watch is not None

    def watch(self, timeout_s: float, network_interface: str | None = None) -> None:
        """Starts the watchdog: it ends all ranks if a collective takes longer than timeout_s, with a report of the
        collective, the step and the missing ranks. All ranks call this once, before any other collective.

        timeout_s: 0: no watchdog, nor in a world of one process. network_interface: leads to rank 0, if hosts have
        several; None: any. Raises ValueError for a timeout that is negative, NaN or infinite.
        """
        if not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise ValueError(f"a collective's timeout of {timeout_s} s; expected seconds, or 0 for no timeout")
        if self.size == 1 or timeout_s == 0:
            return
        self._watch = Watch(self.journal, timeout_s, self._store(network_interface))

    def _store(self, network_interface: str | None) -> Endpoint:
        """Returns the store of the run, by which the watchdogs reach each other; here one that rank 0 serves."""
        import torch

        one_host = self.local_size == self.size
        served = Endpoint.served(self.size, one_host, network_interface) if self.rank == 0 else None
        text = json.dumps(asdict(served)) if served else ""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        received = self._all_gather(data, None, "comm/store")()
        return Endpoint(**json.loads(bytes(received.tolist())))

    def failure(self, call: Call, error: RuntimeError) -> CollectiveError:
        """Returns the error to raise instead of the backend's, with the other ranks' states."""
        self.journal.in_flight.discard(call)
        if self._watch:
            return CollectiveError(self._watch.describe_failure(call, str(error)))
        return CollectiveError(
            f"collective {call.name} failed on rank {self.rank}, step {self.step}, call {call.nth} of that name: "
            f"{error}"
        )

    def close(self) -> None:
        """Ends the communication with the other processes; no collective may follow."""
        call = self.journal.begin("close")  # may wait for the others
        try:
            self._leave()
        finally:
            self.journal.in_flight.discard(call)
        if self._watch:
            self._watch.close()
            self._watch = None

    def all_reduce(self, t: Tensor, op: Op = "sum", *, name: str) -> Tensor:
        """Returns the elementwise sum or maximum over the ranks; t has the same shape and dtype on all of them."""
        return self.start_all_reduce(t, op, name=name).wait()

    def all_gather(self, t: Tensor, *, name: str) -> Tensor:
        """Returns the rows (dim 0) of all ranks in rank order. Their number may differ between ranks, and be 0."""
        return self.start_all_gather(t, name=name).wait()

    def broadcast(self, t: Tensor, root: int = 0, *, name: str) -> Tensor:
        """Returns t of rank `root`. Shape and dtype are equal on all ranks."""
        self._count(name, t)
        wire, restore = _as_sent(t)
        return self._start(name, lambda: self._broadcast(wire, root, name), restore).wait()

    def barrier(self, *, name: str = "barrier") -> None:
        """Returns when every rank has called it."""
        import torch

        self.all_reduce(torch.zeros(1), name=name)

    def start_all_reduce(self, t: Tensor, op: Op = "sum", *, name: str, in_place: bool = False) -> Work:
        """Starts `all_reduce` in the background. in_place: the result is written over t, which is contiguous."""
        import torch

        _check_reducible(name, t)
        self._count(name, t)
        total = t if in_place else t.clone(memory_format=torch.contiguous_format)
        return self._start(name, lambda: self._all_reduce(total, op, name))

    def start_all_gather(self, t: Tensor, rows: Sequence[int] | None = None, *, name: str) -> Work:
        """Starts `all_gather` in the background. rows: the number of rows of every rank, equal on all ranks, if known:
        torch.distributed otherwise exchanges it first, and waits."""
        if t.dim() == 0:
            raise ValueError(f"{name}: all_gather needs rows; got a scalar, expected at least one dimension")
        if rows is not None and (len(rows) != self.size or rows[self.rank] != t.shape[0]):
            raise ValueError(
                f"{name}: rows {list(rows)} must name {self.size} ranks and give this one its {t.shape[0]} rows"
            )
        self._count(name, t)
        wire, restore = _as_sent(t)
        return self._start(name, lambda: self._all_gather(wire, rows, name), restore)

    def start_reduce_scatter(self, t: Tensor, rows: Sequence[int], *, name: str) -> Work:
        """Starts, in the background, to sum t, (sum(rows), ...), over the ranks; the result is this rank's rows of the
        sum: rows[rank] of them, after those of the ranks before it. rows: of every rank, equal on all ranks."""
        _check_reducible(name, t)
        if t.dim() == 0:
            raise ValueError(f"{name}: reduce_scatter needs rows; got a scalar, expected at least one dimension")
        if len(rows) != self.size or sum(rows) != t.shape[0]:
            raise ValueError(f"{name}: rows {list(rows)} must name {self.size} ranks and add up to {t.shape[0]} rows")
        self._count(name, t)
        parts = t.contiguous()
        return self._start(name, lambda: self._reduce_scatter(parts, rows, name))

    def start_all_to_all(
        self, t: Tensor, rows: Sequence[int] | None = None, arriving: Sequence[int] | None = None, *, name: str
    ) -> Work:
        """Sends block r of this rank's t to rank r, in the background; the result is the blocks that the ranks had for
        this one, in rank order.

        rows: of each block of t; arriving: of each block of the result, sent by rank r; both have W numbers, each
        possibly 0. Without them t is (W * n, ...), of equal shape on all ranks.
        """
        if (rows is None) != (arriving is None):
            raise ValueError(f"{name}: give both the rows that go and those that arrive, or neither")
        if rows is None or arriving is None:
            if t.dim() == 0 or t.shape[0] % self.size:
                raise ValueError(
                    f"{name}: {tuple(t.shape)} cannot be cut into {self.size} equal blocks of rows, one for each rank"
                )
            rows = arriving = [t.shape[0] // self.size] * self.size
        fit = len(rows) == len(arriving) == self.size and sum(rows) == t.shape[0]
        if not fit or rows[self.rank] != arriving[self.rank]:
            raise ValueError(
                f"{name}: rows {list(rows)} and arriving {list(arriving)} must name {self.size} ranks, add up to "
                f"{t.shape[0]} rows that go, and agree on rank {self.rank}'s own"
            )
        self._count(name, t)
        wire, restore = _as_sent(t)
        return self._start(name, lambda: self._all_to_all(wire, rows, arriving, name), restore)

    @contextmanager
    def count_traffic(self) -> Iterator[Traffic]:
        """Counts the collectives of the block only."""
        outer, self.traffic = self.traffic, Traffic()
        try:
            yield self.traffic
        finally:
            outer.calls.update(self.traffic.calls)
            outer.num_bytes.update(self.traffic.num_bytes)
            self.traffic = outer

    def tell(self, failed: bool = False) -> None:
        """Tells the other ranks whether this one has failed in a block of `comm.all_or_none`, before each collective in
        it and at its end. Raises OtherRankFailed if one has. A collective there, else nothing."""
        if (name := self.contained) and self.size > 1:
            import torch

            number = torch.tensor([float(failed)])
            if self._start(name, lambda: self._all_reduce(number, "max", name)).wait().item():
                raise OtherRankFailed

    def _start(
        self, name: str, start: Callable[[], Callable[[], Tensor]], restore: Callable[[Tensor], Tensor] | None = None
    ) -> Work:
        """Hands a collective to the backend, which may block here; restore: converts its result back."""
        call = self.journal.begin(name)
        try:
            finish = start()
        except RuntimeError as error:
            raise self.failure(call, error) from error
        finally:
            self.journal.in_flight.discard(call)
        return Work(self, call, finish if restore is None else lambda: restore(finish()))

    def _count(self, name: str, t: Tensor) -> None:
        self.tell()
        self.traffic.calls[name] += 1
        self.traffic.num_bytes[name] += t.numel() * t.element_size()

    # A backend's methods, which return what finishes the collective on a contiguous tensor; _all_reduce is in place.

    @abstractmethod
    def _all_reduce(self, t: Tensor, op: Op, name: str) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _all_gather(self, t: Tensor, rows: Sequence[int] | None, name: str) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _reduce_scatter(self, t: Tensor, rows: Sequence[int], name: str) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _all_to_all(
        self, t: Tensor, rows: Sequence[int], arriving: Sequence[int], name: str
    ) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _broadcast(self, t: Tensor, root: int, name: str) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _leave(self) -> None: ...


def _check_reducible(name: str, t: Tensor) -> None:
    if str(t.dtype) not in _REDUCIBLE:
        raise ValueError(f"{name}: {t.dtype} is not summed by every backend; convert to float32 or int64 first")


def _as_sent(t: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Returns (t in a dtype that all backends support, a function that converts the result back). Dtypes that some
    backend lacks are sent as bytes, as no sum is needed."""
    import torch

    t = t.contiguous()
    if str(t.dtype) in _REDUCIBLE or t.dtype == torch.uint8:
        return t, lambda arrived: arrived
    if t.dim() == 0:
        return t[None].view(torch.uint8), lambda arrived: arrived.view(t.dtype)[0]
    row_shape = t.shape[1:]
    as_bytes = t.reshape(len(t), math.prod(row_shape)).view(torch.uint8)
    if not as_bytes.shape[1]:
        return as_bytes, lambda arrived: t.new_empty(len(arrived), *row_shape)
    return as_bytes, lambda arrived: arrived.view(t.dtype).reshape(len(arrived), *row_shape)


def pad_rows(t: Tensor, rows: Sequence[int]) -> Tensor:
    """Pads each rank's block with zeros, (sum(rows), ...) -> (W * max(rows), ...), for scatters of equal blocks."""
    most = max(rows)
    if all(count == most for count in rows):
        return t
    padded = t.new_zeros(len(rows), most, *t.shape[1:])
    for block, part in zip(padded, t.split(list(rows)), strict=True):
        block[: len(part)] = part
    return padded.flatten(0, 1)


class SingleWorld(World):
    """A world of one process, without a launcher."""

    backend = "single"

    def __init__(self) -> None:
        super().__init__(Launch("single"))

    def _all_reduce(self, t: Tensor, op: Op, name: str) -> Callable[[], Tensor]:
        return lambda: t

    def _identity(self, t: Tensor, *args: Any, **kwargs: Any) -> Callable[[], Tensor]:
        return t.clone

    _all_gather = _reduce_scatter = _all_to_all = _identity

    def _broadcast(self, t: Tensor, root: int, name: str) -> Callable[[], Tensor]:
        if root != 0:
            raise ValueError(f"{name}: root {root} does not exist in a world of one process")
        return t.clone

    def _leave(self) -> None:
        pass
