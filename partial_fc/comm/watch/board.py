"""What the ranks of a world tell each other of hanging collectives, as keys of a store that all of them reach.

    state R           rank R's newest RankState, every few seconds
    left R            why it has left, and when
    processes on H    the ranks of a host, with their process numbers
    event N           {"query": ...} {"end": r} {"rank_0_leaves": why}; numbered from 0, read by all in this order
    answer N R        rank R's RankState, asked for by event N
    hang              the rank that reports a hang, and so ends the job

A value is JSON. The times in it are seconds since the world began, which all ranks count from the same collective on.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from partial_fc.comm.launch import addresses, tcp_store
from partial_fc.comm.launch.tcp_store import NotAStore, dial, has_ended, read
from partial_fc.comm.watch.report import PeerState, RankState

if TYPE_CHECKING:
    import torch.distributed as dist

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
    """One rank's view of the keys, for one thread. Its methods raise dist.DistError if the store is gone."""

    def __init__(self, store: "dist.Store", rank: int, size: int):
        self._store, self._rank, self._size = store, rank, size
        self._began = time.monotonic()
        self._num_read = 0  # events
        self._host = f"processes on {socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
        store.append(self._host, f"{rank} {os.getpid()}\n")

    def write_state(self, state: RankState, event: int | None = None) -> None:
        """Writes this rank's newest state; event: its answer to that one."""
        state.at_s = time.monotonic() - self._began
        if event is not None:
            state.ended_here = sorted(self.ended_here())
        key = f"state {self._rank}" if event is None else f"answer {event} {self._rank}"
        self._store.set(key, json.dumps(asdict(state)))

    def write_goodbye(self, why: str) -> None:
        self._store.set(f"left {self._rank}", json.dumps({"why": why, "at_s": time.monotonic() - self._began}))

    def have_left(self, ranks: list[int]) -> bool:
        return self._store.check([f"left {rank}" for rank in ranks])

    def news(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the events that this rank has not read, with their numbers."""
        while text := read(self._store, f"event {self._num_read}"):
            self._num_read += 1
            yield self._num_read - 1, json.loads(text)

    def post(self, event: dict[str, Any]) -> int | None:
        """Writes the event after those that this rank has read. Returns its number; None: there is one already."""
        text = json.dumps(event)
        written = self._store.compare_set(f"event {self._num_read}", "", text).decode()
        return self._num_read if written == text else None

    def claim_hang(self) -> int:
        """Returns the rank that reports a hang: the first that called this."""
        return int(self._store.compare_set("hang", "", str(self._rank)))

    def answers_are_there(self, event: int) -> bool:
        """Returns whether every rank has answered, has left or, on this host, has ended."""
        expected = set(range(self._size)) - self.ended_here()
        return all(self._store.check([f"answer {event} {rank}"]) or self.have_left([rank]) for rank in expected)

    def peer_states(self, event: int) -> list[PeerState]:
        """Returns what is known of all ranks, their answers included."""
        answers = [self._state(f"answer {event} {rank}") for rank in range(self._size)]
        ended = self.ended_here().union(*(answer.ended_here for answer in answers if answer))
        return [self._peer_state(rank, answers[rank], rank in ended) for rank in range(self._size)]

    def ended_here(self) -> set[int]:
        """Returns the ranks of this host whose process has ended."""
        pairs = [line.split() for line in read(self._store, self._host).splitlines()]
        return {int(rank) for rank, process in pairs if has_ended(int(process))}

    def _peer_state(self, rank: int, answer: RankState | None, has_ended: bool) -> PeerState:
        newest, now = self._state(f"state {rank}"), time.monotonic() - self._began
        if goodbye := read(self._store, f"left {rank}"):
            left = json.loads(goodbye)
            return PeerState(rank, "left", max(0.0, now - left["at_s"]), bool(answer), answer or newest, left["why"])
        age_s = max(0.0, now - newest.at_s) if newest else 0.0
        link = "lost" if has_ended else "open" if newest else "never"
        return PeerState(rank, link, age_s, bool(answer), answer or newest)

    def _state(self, key: str) -> RankState | None:
        text = read(self._store, key)
        return RankState(**json.loads(text)) if text else None
