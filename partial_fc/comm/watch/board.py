"""What the ranks of a world tell each other of hanging collectives, as keys of a store that all of them reach.

state R       rank R's newest RankState as JSON, every few seconds, and soon after `asked` has changed
hang          the rank that reports a hang: all end
asked, left   counts: of questions; of the ranks that read no more
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
from partial_fc.comm.watch.report import PeerState, RankState

if TYPE_CHECKING:
    import torch.distributed as dist

ANSWER_S = 3.0  # a rank that has not answered by then is unresponsive
_CONNECT_S = 5.0
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

    def write(self, state: RankState) -> None:
        state.at_s = time.monotonic() - self._began
        self._store.set(f"state {self._rank}", json.dumps(asdict(state)))

    def leave(self, state: RankState, patience_s: float) -> None:
        """Writes the last state. On rank 0, which may serve the store, waits until the others read no more."""
        self.write(state)
        left, deadline = self._store.add("left", 1), time.monotonic() + patience_s
        while self._rank == 0 and left < self._size and time.monotonic() < deadline:
            time.sleep(0.02)
            left = self._store.add("left", 0)

    def num_asked(self) -> int:
        return self._store.add("asked", 0)

    def claim_hang(self) -> bool:
        """Has all ranks end soon. Returns whether this one is to report, as the first."""
        first = self._store.compare_set("hang", "", str(self._rank))
        self._store.add("asked", 1)
        return first.decode() == str(self._rank)

    def hangs(self) -> bool:
        """Returns whether a rank reports a hang."""
        return bool(read(self._store, "hang"))

    def ask(self) -> list[PeerState]:
        """Returns what is known of all ranks, once all have answered or ANSWER_S are over."""
        before, deadline = self._states(), time.monotonic() + ANSWER_S
        self._store.add("asked", 1)
        while True:
            peers = [self._peer(rank, *states) for rank, states in enumerate(zip(before, self._states(), strict=True))]
            if all(peer.is_known for peer in peers) or time.monotonic() > deadline:
                return peers
            time.sleep(0.05)

    def _states(self) -> list[RankState | None]:
        texts = [read(self._store, f"state {rank}") for rank in range(self._size)]
        return [RankState(**json.loads(text)) if text else None for text in texts]

    def _peer(self, rank: int, before: RankState | None, state: RankState | None) -> PeerState:
        if state is None:
            return PeerState(rank)
        age_s = max(0.0, time.monotonic() - self._began - state.at_s)
        answered = before is None or before.at_s != state.at_s
        is_here = (state.host, state.namespace) == (socket.gethostname(), own_namespace())
        return PeerState(rank, state, age_s, answered, is_here and has_ended(state.process))


def own_namespace() -> str:
    """Returns the name of the namespace of this process's number: a container has its own."""
    return os.readlink("/proc/self/ns/pid")
