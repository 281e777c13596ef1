"""Those who start together find each other through the keys of a store: the ranks of a run (meet_ranks.py), or the
nodes that start its ranks (meet_nodes.py).

1. each claims its number, "rank 3"; a number that is claimed twice is an error
2. the leader sees all there, and decides "all here"; or somebody decides what is wrong. The first outcome holds for all
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

ALL_HERE = "all here"
_OUTCOME = "outcome"
_POLL_S = 0.05
_CHECKS_A_SECOND = 5000  # of all participants together, whose store one of them keeps
_NOTICE_S = 10.0  # after which it is printed who is waited for


class Rendezvous:
    """One participant, number `number` of `size`. store: of torch.distributed, or ours; kind: what participants are
    called, "rank"; me, place: this one and the store, for messages; timeout_s: in which all are to come."""

    def __init__(self, store: Any, kind: str, number: int, size: int, me: str, place: str, timeout_s: float):
        self.store, self.me, self.place, self.timeout_s = store, me, place, timeout_s
        self.keys = [f"{kind} {each}" for each in range(size)]
        self.own_key = self.keys[number]

    def read(self, key: str) -> bytes:
        """The key's value, at once; b"": there is none."""
        return self.store.get(key) if self.store.check([key]) else b""

    def claim(self, text: str) -> bytes:
        """Claims this participant's number. Returns what stands there then: another text is another's claim."""
        return self.store.compare_set(self.own_key, "", text)

    def decide(self, text: str) -> str:
        """Makes `text` the outcome, unless there is one. Returns the one that holds."""
        return self.store.compare_set(_OUTCOME, "", text).decode(errors="replace")

    @property
    def outcome(self) -> str:
        """The outcome; "": not yet."""
        return self.read(_OUTCOME).decode(errors="replace")

    def forget(self) -> None:
        """Removes the outcome."""
        self.store.delete_key(_OUTCOME)

    def look(self) -> str:
        """Called again and again while this participant waits. Returns the outcome, where it is the one to see it."""
        raise NotImplementedError

    def remedy(self, absent: list[str]) -> str:
        """What may be wrong where these have not come."""
        raise NotImplementedError

    def described(self, claim: bytes, key: str) -> str:
        """Who has written a claim."""
        raise NotImplementedError

    def wait(self, patience_s: float, notice: bool = True) -> str:
        """Waits for the outcome, for patience_s seconds at most. notice: whether to print who is waited for."""
        started = time.monotonic()
        poll_s = max(_POLL_S, len(self.keys) / _CHECKS_A_SECOND)
        while not (outcome := self.outcome):
            waited_s = time.monotonic() - started
            if text := self.look() or (self._missing() if waited_s > patience_s else ""):
                return self.decide(text)
            if notice and waited_s > _NOTICE_S:
                notice = False
                print(f"{self.me} waits at {self.place} for {', '.join(self.absent())}", file=sys.stderr, flush=True)
            time.sleep(poll_s)
        return outcome

    def absent(self) -> list[str]:
        """The keys of those who have not come."""
        return [key for key in self.keys if not self.store.check([key])]

    def present(self) -> list[str]:
        """Those who have come, in words."""
        return [self.described(claim, key) for key in self.keys if (claim := self.read(key))]

    def _missing(self) -> str:
        absent = self.absent()
        return (
            f"{listed(absent)} did not come within {self.timeout_s:g} s to {self.place}. There are: "
            f"{listed(self.present())}. {self.remedy(absent)}"
        )


def listed(items: Sequence[str], most: int = 16) -> str:
    """The items in a sentence, the first ones where there are many."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
