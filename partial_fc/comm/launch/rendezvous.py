"""The rendezvous of processes through the keys of a store: of a run's ranks (meet_ranks.py), or of nodes
(meet_nodes.py).

1. each claims its number, "rank 3"; a number that is claimed twice is an error
2. the leader sees all of them and sets the outcome "all here"; or one sets an error. The first outcome applies to all
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

ALL_HERE = "all here"
_OUTCOME = "outcome"
_POLL_S = 0.05
_CHECKS_A_SECOND = 5000  # of all participants together, as one of them hosts the store
_NOTICE_S = 10.0  # after which the missing ones are printed


class Rendezvous:
    """One participant, number `number` of `size`. store: torch.distributed's or ours; kind: the noun for participants,
    "rank"; me, place: this one and the store, for messages; timeout_s: the time for all to join."""

    def __init__(self, store: Any, kind: str, number: int, size: int, me: str, place: str, timeout_s: float):
        self.store, self.me, self.place, self.timeout_s = store, me, place, timeout_s
        self.keys = [f"{kind} {each}" for each in range(size)]
        self.own_key = self.keys[number]

    def read(self, key: str) -> bytes:
        """Returns the key's value at once; b"" if it is not set."""
        return self.store.get(key) if self.store.check([key]) else b""

    def claim(self, text: str) -> bytes:
        """Claims this participant's number. Returns the value that is then there: another text is another's claim."""
        return self.store.compare_set(self.own_key, "", text)

    def decide(self, text: str) -> str:
        """Sets the outcome to `text`, unless there is one. Returns the one in effect."""
        return self.store.compare_set(_OUTCOME, "", text).decode(errors="replace")

    @property
    def outcome(self) -> str:
        """Returns the outcome; "" if there is none yet."""
        return self.read(_OUTCOME).decode(errors="replace")

    def forget(self) -> None:
        """Removes the outcome."""
        self.store.delete_key(_OUTCOME)

    def look(self) -> str:
        """Called repeatedly during the wait. Returns the outcome, if this participant determines it."""
        raise NotImplementedError

    def remedy(self, absent: list[str]) -> str:
        """Returns what to check if these participants are missing."""
        raise NotImplementedError

    def described(self, claim: bytes, key: str) -> str:
        """Describes the participant that wrote a claim."""
        raise NotImplementedError

    def wait(self, patience_s: float, notice: bool = True) -> str:
        """Returns the outcome, after patience_s seconds at most. notice: whether to print the missing participants."""
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
        """Returns the keys of the missing participants."""
        return [key for key in self.keys if not self.store.check([key])]

    def present(self) -> list[str]:
        """Returns the participants that have joined, for messages."""
        return [self.described(claim, key) for key in self.keys if (claim := self.read(key))]

    def _missing(self) -> str:
        absent = self.absent()
        return (
            f"{listed(absent)} did not come within {self.timeout_s:g} s to {self.place}. There are: "
            f"{listed(self.present())}. {self.remedy(absent)}"
        )


def listed(items: Sequence[str], most: int = 16) -> str:
    """Returns the items as text, the first ones if there are many."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
