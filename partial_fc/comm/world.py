"""The front door of the collectives: names, checks, counts; the backends below it only move tensors."""

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from partial_fc.comm.launch import Launch

Op = Literal["sum", "max"]
_REDUCIBLE = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)


@dataclass
class Traffic:
    """Calls and payload bytes that this rank handed in, by the collective's name."""

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def per_step(self, num_steps: int) -> dict[str, dict[str, float]]:
        """Name -> calls and bytes of one step on average, for a report."""
        return {
            name: {"calls": calls / num_steps, "bytes": self.num_bytes[name] / num_steps}
            for name, calls in self.calls.items()
        }


class Pending:
    """A collective under way. `wait` returns its result; the input must not be written to before that."""

    def __init__(self, world: "World", finish: Callable[[], Tensor]):
        self._world = world
        self._finish = finish

    def wait(self) -> Tensor:
        started = time.perf_counter()
        result = self._finish()
        self._world.seconds_waiting += time.perf_counter() - started
        return result


class World(ABC):
    """This process among its peers.

    Every collective must be called by all ranks, with the same name; those of one name follow one another.
    Nothing here averages: a reduction is a sum or a maximum, so that only the loss ever divides.
    """

    backend: Literal["horovod", "torch", "single"]

    def __init__(self, launch: Launch):
        self.rank = launch.rank
        self.size = launch.size
        self.local_rank = launch.local_rank
        self.local_size = launch.local_size
        self.step = 0  # the update that is being made, counted from 1, for reports; whoever trains sets it
        self.traffic = Traffic()  # since the start
        self.seconds_waiting = 0.0  # since the start: time in which this process did nothing but wait

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.backend})"

    def all_reduce(self, t: Tensor, op: Op = "sum", *, name: str) -> Tensor:
        """Sum or maximum over the ranks, elementwise; t has the same shape and dtype on all of them."""
        return self.start_all_reduce(t, op, name=name).wait()

    def all_gather(self, t: Tensor, *, name: str) -> Tensor:
        """The rows (dim 0) of all ranks in rank order. The number of rows may differ between ranks, and be 0."""
        return self.start_all_gather(t, name=name).wait()

    def reduce_scatter(self, t: Tensor, rows: Sequence[int], *, name: str) -> Tensor:
        """Sums t, (sum(rows), ...), over the ranks and returns this rank's rows of the sum: the rows[rank] ones
        that follow those of the ranks before it. rows: the number of rows of every rank, equal on all of them.
        """
        return self.start_reduce_scatter(t, rows, name=name).wait()

    def broadcast(self, t: Tensor, root: int = 0, *, name: str) -> Tensor:
        """What rank `root` holds in t. Shape and dtype are equal on all ranks."""
        self._count(name, t)
        wire, restore = _as_sent(t)
        finish = self._broadcast(wire, root, name)
        return Pending(self, lambda: restore(finish())).wait()

    def barrier(self, *, name: str = "barrier") -> None:
        """Returns when every rank has called it."""
        self.all_reduce(torch.zeros(1), name=name)

    def start_all_reduce(self, t: Tensor, op: Op = "sum", *, name: str, in_place: bool = False) -> Pending:
        """`all_reduce`, in the background. in_place: the result is written over t, which is contiguous."""
        if t.dtype not in _REDUCIBLE:
            raise ValueError(
                f"{name}: {t.dtype} is not summed by every backend; convert to float32 or int64 first"
            )
        self._count(name, t)
        return Pending(
            self,
            self._all_reduce(t if in_place else t.clone(memory_format=torch.contiguous_format), op, name),
        )

    def start_all_gather(self, t: Tensor, rows: Sequence[int] | None = None, *, name: str) -> Pending:
        """`all_gather`, in the background. rows: the number of rows of every rank, equal on all of them, where the
        caller knows it: torch.distributed otherwise asks the ranks for it first, and waits for the answer."""
        if t.dim() == 0:
            raise ValueError(f"{name}: all_gather needs rows; got a scalar, expected at least one dimension")
        if rows is not None and (len(rows) != self.size or rows[self.rank] != t.shape[0]):
            raise ValueError(
                f"{name}: rows {list(rows)} must name {self.size} ranks and give this one its {t.shape[0]} rows"
            )
        self._count(name, t)
        wire, restore = _as_sent(t)
        finish = self._all_gather(wire, rows, name)
        return Pending(self, lambda: restore(finish()))

    def start_reduce_scatter(self, t: Tensor, rows: Sequence[int], *, name: str) -> Pending:
        """`reduce_scatter`, in the background."""
        if len(rows) != self.size or sum(rows) != t.shape[0]:
            raise ValueError(
                f"{name}: rows {list(rows)} must name {self.size} ranks and add up to {t.shape[0]} rows"
            )
        self._count(name, t)
        return Pending(self, self._reduce_scatter(t.contiguous(), rows, name))

    def start_all_to_all(self, t: Tensor, *, name: str) -> Pending:
        """Block r of this rank's t goes to rank r, in the background: t (W * n, ...), of equal shape on all ranks,
        becomes (W * n, ...), the blocks that the ranks had for this one, in rank order."""
        if t.dim() == 0 or t.shape[0] % self.size:
            raise ValueError(
                f"{name}: {tuple(t.shape)} cannot be cut into {self.size} equal blocks of rows, one for each rank"
            )
        self._count(name, t)
        wire, restore = _as_sent(t)
        finish = self._all_to_all(wire, name)
        return Pending(self, lambda: restore(finish()))

    @contextmanager
    def counted(self) -> Iterator[Traffic]:
        """Counts only the calls made inside the block."""
        outer, self.traffic = self.traffic, Traffic()
        try:
            yield self.traffic
        finally:
            outer.calls.update(self.traffic.calls)
            outer.num_bytes.update(self.traffic.num_bytes)
            self.traffic = outer

    def _count(self, name: str, t: Tensor) -> None:
        self.traffic.calls[name] += 1
        self.traffic.num_bytes[name] += t.numel() * t.element_size()

    # What a backend provides: each starts a collective on a contiguous tensor and returns what finishes it.
    # _all_reduce writes its result over t.

    @abstractmethod
    def _all_reduce(self, t: Tensor, op: Op, name: str) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _all_gather(self, t: Tensor, rows: Sequence[int] | None, name: str) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _reduce_scatter(self, t: Tensor, rows: Sequence[int], name: str) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _all_to_all(self, t: Tensor, name: str) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _broadcast(self, t: Tensor, root: int, name: str) -> Callable[[], Tensor]: ...

    @abstractmethod
    def close(self) -> None:
        """Leaves the other processes; no collective may follow."""


def _as_sent(t: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(t as the backends can move it, how to turn what arrives back). Not all of them know all dtypes; to move is
    not to add, so the others go as bytes."""
    t = t.contiguous()
    if t.dtype in _REDUCIBLE or t.dtype == torch.uint8:
        return t, lambda arrived: arrived
    row_shape = t.shape[1:]
    as_bytes = t.view(-1, math.prod(row_shape)).view(torch.uint8)
    return as_bytes, lambda arrived: arrived.view(t.dtype).view(-1, *row_shape)


def pad_rows(t: Tensor, rows: Sequence[int]) -> Tensor:
    """(sum(rows), ...) -> (W * max(rows), ...): each rank's block filled up with zeros, for backends that can
    scatter only equal blocks."""
    most = max(rows)
    if all(count == most for count in rows):
        return t
    padded = t.new_zeros(len(rows), most, *t.shape[1:])
    for block, part in zip(padded, t.split(list(rows)), strict=True):
        block[: len(part)] = part
    return padded.flatten(0, 1)
