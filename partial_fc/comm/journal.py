"""What this process does in collectives: which it has started, and which are in flight at this moment."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Call:
    """One collective of this rank."""

    name: str
    nth: int  # among those of this name, from 1: by (name, nth) ranks mean the same collective
    number: int  # among all collectives of this rank, from 1: what torch.distributed matches by
    waited_s: float = -1.0  # measured by the watch, which has not seen it yet
    done: Callable[[], bool] | None = None  # set where a GPU goes on with it after the host has waited


class Journal:
    """Written by the threads that communicate, read by the one that watches them. No locks: each write is one
    operation on a dict or set, which the interpreter does not interrupt."""

    def __init__(self, rank: int = 0, size: int = 1, backend: str = "single") -> None:
        self.rank = rank
        self.size = size
        self.backend = backend
        self.step = 0  # the update that is being made, from 1
        self.num_started = 0
        self.newest: Call | None = None
        self.newest_of: dict[str, Call] = {}  # by name
        self.in_flight: set[Call] = set()  # whose start or end some thread waits for

    def begin(self, name: str) -> Call:
        """Notes that a collective is handed to the backend, which may already block."""
        before = self.newest_of.get(name)
        self.num_started += 1
        call = Call(name, before.nth + 1 if before else 1, self.num_started)
        self.newest = self.newest_of[name] = call
        self.in_flight.add(call)
        return call

    def oldest_in_flight(self) -> Call | None:
        """The call that was started first of those that some thread waits for."""
        return min(list(self.in_flight), key=lambda call: call.number, default=None)
