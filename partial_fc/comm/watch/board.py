"""What the ranks of a world tell each other of hanging collectives, as keys of a store that all of them reach.

state R           rank R's newest RankState as JSON, every few seconds, and soon after `asked` has changed
processes on H    the ranks of a host, with their process numbers
hang              the rank that reports a hang; end: it has done so, and all are to end
rank 0 has left   why
asked, left       counts: of questions and other news; of the ranks that read no more
"""

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from partial_fc.comm.launch import addresses, tcp_store
from partial_fc.comm.launch.tcp_store import NotAStore, dial, has_ended, read
from partial_fc.comm.watch.report import Link, PeerState, RankState

if TYPE_CHECKING:
    import torch.distributed as dist

ANSWER_S = 3.0  # a rank that has not answered by then is unresponsive
_CONNECT_S = 5.0
HANG, END, RANK_0_HAS_LEFT = "hang", "end", "rank 0 has left"
_served: list["dist.TCPStore"] = []  # until the process ends: others may ask after rank 0 has closed its world


@dataclass(frozen=True)
class Endpoint:
    """A store, at the first of these addresses at which it has the key `world`, the prefix of this world's keys."""

    addresses: list[str]
    port: int
    world: str

    @classmethod
    def served(cls, size: int, one_host: bool, network_interface: str | None = None) -> "Endpoint":
        """Returns that of a store that this process, rank 0, serves from now on."""
        own = ["127.0.0.1"] if one_host else addresses.reachable(network_interface)
        # Only the interface that was named, if any.
        listening = socket.create_server((own[0] if len(own) == 1 else "", 0), backlog=min(size, 1024))
        endpoint = cls(own, listening.getsockname()[1], secrets.token_hex(8))
        _served.append(tcp_store.host(listening, size, _CONNECT_S))
        _served[-1].set(endpoint.world, "")
        return endpoint

    def connect(self) -> "dist.Store | None":
        """Returns the world's keys; None if no address leads to them: one may be another host's here."""
        import torch.distributed as dist

        for address in self.addresses:
            with suppress(OSError, NotAStore, dist.DistError):
                store = dial(address, self.port, _CONNECT_S)
                if store.check([self.world]):
                    return dist.PrefixStore(f"watch of {self.world}", store)
        return None


class Board:
    """A rank's view of the keys, for one thread. began: time.monotonic() when the world began, at about the same moment
    on all ranks. Its methods raise torch.distributed.DistError if the store is gone."""

    def __init__(self, store: "dist.Store", rank: int, size: int, began: float):
        self._store, self._rank, self._size, self._began = store, rank, size, began
        self._host = f"processes on {socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"

    def enter(self, state: RankState) -> None:
        """Writes the first state."""
        self._store.append(self._host, f"{self._rank} {os.getpid()}\n")  # type: ignore[attr-defined]
        self.write(state)

    def write(self, state: RankState) -> None:
        state.ended_here, state.at_s = sorted(self._ended_here()), time.monotonic() - self._began
        self._store.set(f"state {self._rank}", json.dumps(asdict(state)))

    def leave(self, state: RankState, patience_s: float) -> None:
        """Writes the last state. On rank 0, which may serve the store, waits until the others read no more."""
        if state.goodbye:
            self.write(state)
        left = self._store.add("left", 1)
        if self._rank == 0:
            self.tell(RANK_0_HAS_LEFT, state.goodbye)
            deadline = time.monotonic() + patience_s
            while left < self._size and time.monotonic() < deadline:
                time.sleep(0.02)
                left = self._store.add("left", 0)

    def num_asked(self) -> int:
        return self._store.add("asked", 0)

    def tell(self, key: str, value: str) -> str:
        """Sets a key, unless it is set, and has all ranks look soon. Returns its value."""
        found = self._store.compare_set(key, "", value).decode(errors="replace")
        self._store.add("asked", 1)
        return found

    def told(self, key: str) -> str:
        return read(self._store, key)

    def ask(self) -> list[PeerState]:
        """Returns what is known of all ranks, once all have answered or ANSWER_S are over."""
        before, deadline = self._states(), time.monotonic() + ANSWER_S
        self._store.add("asked", 1)
        while True:
            found = self._peer_states(before)
            if all(s.answered or s.link in ("left", "lost") for s in found) or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def _peer_states(self, before: list[RankState | None]) -> list[PeerState]:
        states, now = self._states(), time.monotonic() - self._began
        ended = self._ended_here().union(*(state.ended_here for state in states if state))
        found = []
        for rank, (earlier, state) in enumerate(zip(before, states, strict=True)):
            if state is None:
                found.append(PeerState(rank, "lost" if rank in ended else "never"))
                continue
            link: Link = "left" if state.goodbye else "lost" if rank in ended else "open"
            answered = earlier is None or earlier.at_s != state.at_s
            found.append(PeerState(rank, link, max(0.0, now - state.at_s), answered, state))
        return found

    def _states(self) -> list[RankState | None]:
        texts = [read(self._store, f"state {rank}") for rank in range(self._size)]
        return [RankState(**json.loads(text)) if text else None for text in texts]

    def _ended_here(self) -> set[int]:
        """Returns the ranks of this host whose process has ended."""
        pairs = [line.split() for line in read(self._store, self._host).splitlines()]
        return {int(rank) for rank, process in pairs if has_ended(int(process))}
