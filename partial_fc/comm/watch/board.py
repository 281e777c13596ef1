"""The status board: every rank keeps a connection to rank 0, says now and then where it is, and answers questions.

The operating system closes the connections of a process that dies, so the board knows of that at once. A stopped
process, or a host whose cable was pulled, does not answer. Messages are JSON, one a line.

    rank -> board   {"hello": token, "place": {...}}   {"place": {...}}   {"ask": {...}}   {"told": ""}   {"bye": why}
                    {"answer": n, "place": {...}}
    board -> rank   {"welcome": token}   {"question": {...}, "answer": n}   {"found": [...]}   {"asked_by": r}
                    {"end": r}   {"rank_0_leaves": why}
"""

import asyncio
import contextlib
import json
import logging
import os
import resource
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from partial_fc.comm.watch.report import Place, Seen

ANSWER_S = 3.0  # a rank that has not answered by then gives no sign of life
_log = logging.getLogger("partial_fc")
_LINE_BYTES = 64 << 20  # the longest line: what is known of very many ranks


@dataclass
class Invitation:
    """How the other ranks find the board."""

    port: int
    token: str  # who does not know it is not let in
    addresses: list[str]  # to be tried in this order

    def to_bytes(self, size: int) -> bytes:
        """Filled up to `size` bytes; with as many addresses as fit, as a host with containers may have very many."""
        for num in range(len(self.addresses), 0, -1):
            data = json.dumps(asdict(replace(self, addresses=self.addresses[:num]))).encode()
            if len(data) <= size:
                return data.ljust(size)
        raise ValueError(f"{self}: not one address fits into {size} bytes")

    @classmethod
    def from_bytes(cls, data: bytes) -> "Invitation":
        return cls(**json.loads(data))


@dataclass
class _Guest:
    """A rank, as the board knows it."""

    rank: int
    link: str = "never"
    writer: asyncio.StreamWriter | None = None
    heard: float = field(default_factory=time.monotonic)
    newest: bytes = b""  # its place, not read before somebody asks
    answer: bytes = b""  # its place with what it says to the question that is being asked
    farewell: str = ""

    def seen(self) -> Seen:
        line = self.answer or self.newest
        place = Place(**json.loads(line)["place"]) if line else None
        age_s = time.monotonic() - self.heard
        return Seen(self.rank, self.link, age_s, bool(self.answer), place, self.farewell)  # type: ignore[arg-type]


class Board:
    """Served by a thread of rank 0 until its process ends: ranks at work may still ask when rank 0 has left."""

    def __init__(self, size: int, one_host: bool, network_interface: str | None = None):
        self._guests = [_Guest(rank) for rank in range(size)]
        self._hanging: int | None = None  # the rank that reports a hang, which ends the job
        self._asking = asyncio.Lock()  # questions follow one another
        self._num_asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: set[int] = set()  # ranks that have not answered the question yet
        self._all_answered = asyncio.Event()
        addresses = ["127.0.0.1"] if one_host else own_addresses(network_interface)
        only = addresses[0] if one_host or network_interface else ""
        self.socket = socket.create_server((only, 0), backlog=min(size, 1024))
        self.invitation = Invitation(self.socket.getsockname()[1], secrets.token_hex(16), addresses)
        _allow_open_files(size + 256)

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._guest_comes, sock=self.socket, limit=_LINE_BYTES)

    async def _guest_comes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guest: _Guest | None = None
        try:
            hello = await self._admit(reader)
            if hello is None:
                return
            guest = self._guests[hello["place"]["rank"]]
            guest.writer, guest.link, guest.heard = writer, "open", time.monotonic()
            guest.newest = json.dumps({"place": hello["place"]}).encode()
            send(writer, {"welcome": self.invitation.token})
            while line := await reader.readline():
                guest.heard = time.monotonic()
                await self._take(guest, line)
        except OSError:
            pass  # a connection that broke: seen below
        except Exception:
            who = f"rank {guest.rank}" if guest else "a rank that came"
            _log.exception(f"the status board lets {who} go by a fault of its own; reports may take it for ended")
        finally:
            if guest and guest.writer is writer:
                guest.writer = None
                guest.heard = time.monotonic()
                guest.link = "left" if guest.farewell else "lost"
                self._no_longer_awaited(guest)
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        """What a guest says who knows the token; None: a stranger, who may speak anything."""
        try:
            hello: dict[str, Any] = json.loads(await asyncio.wait_for(reader.readline(), 10.0))
            known = secrets.compare_digest(str(hello["hello"]), self.invitation.token)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return hello if known else None

    async def _take(self, guest: _Guest, line: bytes) -> None:
        if line.startswith(b'{"place"'):  # nearly all of them
            guest.newest = line
            return
        message: dict[str, Any] = json.loads(line)
        if "answer" in message:
            if message["answer"] == self._num_asked:  # else a late one, to a question before
                guest.answer = line
                self._no_longer_awaited(guest)
        elif "ask" in message:
            # In a task of its own: this guest's answer to its own question comes over the same connection.
            task = asyncio.get_running_loop().create_task(self._ask(guest, message["ask"]))
            self._tasks.add(task)  # the loop alone would not keep it alive
            task.add_done_callback(self._has_answered)
        elif "told" in message:
            for other in self._guests:
                send(other.writer, {"end": guest.rank})
        elif "bye" in message:
            guest.farewell = message["bye"]

    def _no_longer_awaited(self, guest: _Guest) -> None:
        self._awaited.discard(guest.rank)
        if not self._awaited:
            self._all_answered.set()

    def _has_answered(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("the status board did not answer a question by a fault of its own", exc_info=task.exception())

    def say_that_rank_0_leaves(self, why: str) -> None:
        """With its process the board ends, too, and nobody can ask any more."""
        for guest in self._guests[1:]:
            send(guest.writer, {"rank_0_leaves": why})

    async def _ask(self, guest: _Guest, question: dict[str, Any]) -> None:
        if question["hangs"]:
            if self._hanging is not None:
                send(guest.writer, {"asked_by": self._hanging})
                return
            self._hanging = guest.rank
        async with self._asking:
            self._num_asked += 1
            for other in self._guests:
                other.answer = b""
                send(other.writer, {"question": question, "answer": self._num_asked})
            self._awaited = {g.rank for g in self._guests if g.link == "open"}
            self._all_answered.clear()
            with contextlib.suppress(TimeoutError):  # who is silent is shown as silent
                await asyncio.wait_for(self._all_answered.wait(), ANSWER_S)
            send(guest.writer, {"found": [asdict(g.seen()) for g in self._guests]})


def send(writer: asyncio.StreamWriter | None, message: dict[str, Any]) -> None:
    """To a guest that may be gone: then its connection says so to the one that reads from it."""
    if writer is not None and not writer.is_closing():
        with contextlib.suppress(OSError):
            writer.write(json.dumps(message).encode() + b"\n")


def seen_from(found: Sequence[dict[str, Any]]) -> list[Seen]:
    """What `Board` sent, as it was."""
    return [Seen(**{**s, "place": Place(**s["place"]) if s["place"] else None}) for s in found]


async def join(
    invitation: Invitation, place: Place, seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """A connection to the board at the first address where it is; None where it is at none of them.

    A host may have addresses that mean another host elsewhere (a container's bridge), hence the token both ways.
    """
    for address in invitation.addresses:
        writer = None
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(address, invitation.port, limit=_LINE_BYTES)
                send(writer, {"hello": invitation.token, "place": asdict(place)})
                if json.loads(await reader.readline())["welcome"] == invitation.token:
                    return reader, writer
        except (OSError, ValueError, KeyError, TypeError):
            if writer is not None:
                writer.close()
    return None


def own_addresses(network_interface: str | None = None) -> list[str]:
    """Addresses by which other hosts may reach this one, the likely ones first.

    network_interface: the only one to be used. Raises ValueError where it has no IPv4 address.
    """
    address = {
        name: e.address for name, found in psutil.net_if_addrs().items() for e in found if e.family == socket.AF_INET
    }
    if network_interface:
        if network_interface not in address:
            raise ValueError(f"--network-interface {network_interface}: no IPv4 address there; this host has {address}")
        return [address[network_interface]]
    told = [
        address.get(name.removeprefix("="))
        for variable in ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        for name in os.environ.get(variable, "").split(",")
    ]
    given = os.environ.get("MASTER_ADDR")  # torchrun's rank 0
    found = [a for a in (*told, given, *address.values(), socket.gethostname()) if a]
    from_outside = [a for a in found if not a.startswith("127.") and a != "localhost"]
    return list(dict.fromkeys(from_outside)) or ["127.0.0.1"]


def _allow_open_files(num: int) -> None:
    """A connection is an open file, and systems allow 1,024 of them unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num:
        most = num if hard == resource.RLIM_INFINITY else min(num, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
