"""Before ranks that come and go enter a new world: all of them are at the door (elastic.py), or nobody goes in.

Two rounds. New processes need some time to start, and one of the old may be lost meanwhile, so rank 0 waits for all to
come, and then for all to say that they still are there. They meet in the store of horovodrun's driver, which empties
it when it makes a new world.
"""

import threading
import time
from dataclasses import dataclass

from partial_fc.comm.elastic.store import request

_SCOPE = "barrier"
_GONE, _READY = b" gone", b" ready"  # after a name
_RANK_0 = "all"  # the key of rank 0's words:
_ARE_YOU_READY, _HERE, _AGAIN = b"ready?", b"here", b"again"
_POLL_S = 0.1
_LONGER_S = 2.0  # the others wait than rank 0: it is the one to say so


@dataclass(frozen=True)
class Barrier:
    """Of one process in one world."""

    address: str  # of the driver's store
    port: int
    name: bytes  # of this process, unlike all others
    rank: int
    size: int
    hosts_changed: threading.Event  # set when hosts have come or are to go, of which rank 0 is told

    def __call__(self, come_s: float, silent_s: float) -> str:
        """Why nobody goes in; nothing where all do. come_s: in which all must come. silent_s: in which those that have
        come must answer."""
        self._put(self.rank, self.name)
        if self.rank == 0:
            problem = self._lead(come_s, silent_s)
            self._put(_RANK_0, _AGAIN if problem else _HERE)
        else:
            problem = self._follow(come_s, silent_s)
        if problem and not self.is_replaced():
            self._put(self.rank, self.name + _GONE)
        return problem

    def is_replaced(self) -> bool:
        """Whether the driver holds this process for dead: its store is not that of this world any more."""
        return not self._get(self.rank).startswith(self.name)

    def _lead(self, come_s: float, silent_s: float) -> str:
        problem = self._wait_for_all(b"", come_s, f"not come within {come_s:.0f} s (--start-timeout)")
        if problem:
            return problem
        self._put(0, self.name + _READY)
        self._put(_RANK_0, _ARE_YOU_READY)
        return self._wait_for_all(_READY, silent_s, f"come, but then been silent for {silent_s:.0f} s")

    def _wait_for_all(self, last_word: bytes, timeout_s: float, what_else: str) -> str:
        deadline = time.monotonic() + timeout_s
        # If it is set, the driver has, most likely, made this world of what has changed.
        known = self.hosts_changed.is_set()
        while True:
            said_W = [self._get(rank) for rank in range(self.size)]
            missing = [
                str(rank)
                for rank, said in enumerate(said_W)
                if not said or said.endswith(_GONE) or not said.endswith(last_word)
            ]
            if not missing:
                return ""
            if self.hosts_changed.is_set() and not known:
                return "hosts have come or are to go"
            if time.monotonic() > deadline:
                return f"of {self.size} processes rank {', '.join(missing)} has {what_else}"
            time.sleep(_POLL_S)

    def _follow(self, come_s: float, silent_s: float) -> str:
        deadline = time.monotonic() + come_s + _LONGER_S
        is_ready = False
        while time.monotonic() < deadline:
            word = self._get(_RANK_0)
            if word and self.is_replaced():
                return "rank 0 has spoken in another world"
            if word == _HERE:
                return ""
            if word == _AGAIN:
                return "rank 0 has called it off"
            if word == _ARE_YOU_READY and not is_ready:
                self._put(self.rank, self.name + _READY)
                is_ready, deadline = True, time.monotonic() + silent_s + _LONGER_S
            time.sleep(_POLL_S)
        return "rank 0 has not said that all are here"

    def _get(self, key: int | str) -> bytes:
        return request(self.address, self.port, "GET", f"/{_SCOPE}/{key}", None)[1]

    def _put(self, key: int | str, word: bytes) -> None:
        request(self.address, self.port, "PUT", f"/{_SCOPE}/{key}", word)
