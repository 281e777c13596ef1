"""The barrier before the ranks of an elastic run enter a new world (membership.py): all of them enter, or none.

It has two rounds. New processes take time to start, and an old one may be lost meanwhile, so rank 0 waits until all
have arrived, and then until all confirm that they are alive. They exchange keys in the store of the driver, emptied for
each world.
"""

import threading
import time
from dataclasses import dataclass

from partial_fc.comm.elastic.store import request

_SCOPE = "barrier"
_GONE, _READY = b" gone", b" ready"  # after a name
_RANK_0 = "all"  # the key of rank 0's answer:
_ARE_YOU_READY, _ENTER, _RETRY = b"ready?", b"here", b"again"
_POLL_S = 0.1
_LONGER_S = 2.0  # the others wait longer than rank 0, which names the missing ranks


@dataclass(frozen=True)
class Barrier:
    """One process at the barrier of one world."""

    driver: tuple[str, int]  # address and port of its store
    name: bytes  # of this process, unique
    rank: int
    size: int
    hosts_changed: threading.Event  # set when hosts are added or removed; Horovod notifies rank 0

    def wait(self, arrive_s: float, silent_s: float) -> str:
        """Returns why no rank enters; "" if all do. All must arrive within arrive_s seconds, and confirm within
        silent_s."""
        self._put(self.rank, self.name)
        if self.rank == 0:
            problem = self._lead(arrive_s, silent_s)
            self._put(_RANK_0, _RETRY if problem else _ENTER)
        else:
            problem = self._follow(arrive_s, silent_s)
        if problem and not self.is_replaced():
            self._put(self.rank, self.name + _GONE)
        return problem

    def is_replaced(self) -> bool:
        """Returns whether the driver has replaced this process: it is not in the store of this world."""
        return not self._get(self.rank).startswith(self.name)

    def _lead(self, arrive_s: float, silent_s: float) -> str:
        problem = self._wait_for_all(b"", arrive_s, f"not joined within {arrive_s:.0f} s (--start-timeout)")
        if problem:
            return problem
        self._put(0, self.name + _READY)
        self._put(_RANK_0, _ARE_YOU_READY)
        return self._wait_for_all(_READY, silent_s, f"joined, but then been silent for {silent_s:.0f} s")

    def _wait_for_all(self, last_word: bytes, timeout_s: float, what_else: str) -> str:
        deadline = time.monotonic() + timeout_s
        # If it is set, the driver has probably made this world because of that change.
        changed_before = self.hosts_changed.is_set()
        while True:
            word_W = [self._get(rank) for rank in range(self.size)]
            missing = [
                str(rank)
                for rank, word in enumerate(word_W)
                if not word or word.endswith(_GONE) or not word.endswith(last_word)
            ]
            if not missing:
                return ""
            if self.hosts_changed.is_set() and not changed_before:
                return "hosts were added or removed"
            if time.monotonic() > deadline:
                return f"of {self.size} processes rank {', '.join(missing)} has {what_else}"
            time.sleep(_POLL_S)

    def _follow(self, arrive_s: float, silent_s: float) -> str:
        deadline = time.monotonic() + arrive_s + _LONGER_S
        is_ready = False
        while time.monotonic() < deadline:
            word = self._get(_RANK_0)
            if word and self.is_replaced():
                return "rank 0 has answered in another world"
            if word == _ENTER:
                return ""
            if word == _RETRY:
                return "rank 0 has cancelled the start"
            if word == _ARE_YOU_READY and not is_ready:
                self._put(self.rank, self.name + _READY)
                is_ready, deadline = True, time.monotonic() + silent_s + _LONGER_S
            time.sleep(_POLL_S)
        return "rank 0 has not answered that all are here"

    def _get(self, key: int | str) -> bytes:
        return request(self.driver, "GET", f"/{_SCOPE}/{key}")[1]

    def _put(self, key: int | str, word: bytes) -> None:
        request(self.driver, "PUT", f"/{_SCOPE}/{key}", word)
