"""The status server: every rank keeps a connection to rank 0, sends its state regularly, and answers queries.

The operating system closes the connections of a process that dies, so the server sees that at once. A stopped process,
or a disconnected host, does not answer. Messages are JSON, one a line.

    rank -> server   {"token": token, "state": {...}}   {"state": {...}}   {"ask": {...}}   {"reported": ""}
                    {"answer": n, "state": {...}}   {"bye": why}
    server -> rank   {"welcome": token}   {"query": {...}, "answer": n}   {"peer_states": [...]}   {"asked_by": r}
                    {"end": r}   {"rank_0_leaves": why}
"""

import asyncio
import contextlib
import json
import logging
import resource
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from partial_fc.comm.auth.handshake import ANSWER_BYTES, PRE_AUTH_BYTES, PRE_AUTH_S, Limiter, read_line
from partial_fc.comm.launch import addresses
from partial_fc.comm.watch.report import Link, PeerState, RankState

ANSWER_S = 3.0  # a rank that has not answered by then is unresponsive
_log = logging.getLogger("partial_fc")


@dataclass
class Endpoint:
    """The address of the server."""

    port: int
    token: str  # sent first on a connection, which is closed otherwise
    addresses: list[str]  # to be tried in this order


@dataclass
class _Client:
    """A connected rank."""

    rank: int
    link: Link = "never"
    writer: asyncio.StreamWriter | None = None
    heard: float = field(default_factory=time.monotonic)  # when it sent something, or its connection ended
    newest: dict[str, Any] | None = None  # its state
    answer: dict[str, Any] | None = None  # its state with the answer to the query that is being asked
    goodbye: str = ""

    def peer_state(self) -> PeerState:
        given = self.answer or self.newest
        state = RankState(**given) if given else None
        age_s = time.monotonic() - self.heard
        return PeerState(self.rank, self.link, age_s, self.answer is not None, state, self.goodbye)


class StatusServer:
    """The server, in a thread of rank 0 until its process ends: it answers even after rank 0 has closed its world."""

    def __init__(self, size: int, one_host: bool, network_interface: str | None = None):
        self._clients = [_Client(rank) for rank in range(size)]
        self._hanging: int | None = None  # the rank that reports a hang, and so ends the job
        self._asking = asyncio.Lock()  # serialises queries
        self._num_asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._limiter = Limiter(size + 16)
        own = ["127.0.0.1"] if one_host else addresses.reachable(network_interface)
        # Only the interface that was named, if any.
        self.socket = socket.create_server((own[0] if len(own) == 1 else "", 0), backlog=min(size, 1024))
        self.endpoint = Endpoint(self.socket.getsockname()[1], secrets.token_hex(16), own)
        _allow_open_files(size + 256)

    async def serve(self) -> None:
        self._server = await asyncio.start_server(self._on_connect, sock=self.socket, limit=PRE_AUTH_BYTES)

    async def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client: _Client | None = None
        try:
            with self._limiter.waiting(writer):
                state = await self._admit(reader)
            if state is None:
                return
            client = self._clients[state["rank"]]
            client.writer, client.link, client.heard = writer, "open", time.monotonic()
            client.newest = state
            send(writer, {"welcome": self.endpoint.token})
            while line := await read_line(reader):
                client.heard = time.monotonic()
                self._handle(client, json.loads(line))
        except OSError:
            pass  # the connection broke, as recorded below
        except Exception:
            who = f"rank {client.rank}" if client else "a rank that came"
            _log.exception(f"the status server lets {who} go by a fault of its own; reports may take it for ended")
        finally:
            if client and client.writer is writer:
                client.writer = None
                client.heard = time.monotonic()
                client.link = "left" if client.goodbye else "lost"
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        """Returns the state of a rank that knows the token; None for other messages."""
        try:
            greeting = json.loads(await asyncio.wait_for(read_line(reader), PRE_AUTH_S))
            has_token = secrets.compare_digest(greeting["token"].encode(), self.endpoint.token.encode())
            state = greeting["state"]
            is_rank = type(state["rank"]) is int and 0 <= state["rank"] < len(self._clients)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return state if has_token and is_rank else None

    def _handle(self, client: _Client, message: dict[str, Any]) -> None:
        if "answer" in message:
            if message["answer"] == self._num_asked:  # else a late one, to an earlier query
                client.answer = message["state"]
        elif "state" in message:
            client.newest = message["state"]
        elif "ask" in message:
            # In a task of its own: this client's answer to its own query comes over the same connection.
            task = asyncio.get_running_loop().create_task(self._ask(client, message["ask"]))
            self._tasks.add(task)  # the loop keeps only a weak reference
            task.add_done_callback(self._tasks.discard)
            log_fault_of(task, "the status server did not answer a query by a fault of its own")
        elif "reported" in message:
            for other in self._clients:
                send(other.writer, {"end": client.rank})
        elif "bye" in message:
            client.goodbye = message["bye"]

    def announce_exit_of_rank_0(self, why: str) -> None:
        """Tells the others why rank 0 leaves: the server ends with its process, and queries are no longer possible."""
        for client in self._clients[1:]:
            send(client.writer, {"rank_0_leaves": why})

    async def _ask(self, client: _Client, query: dict[str, Any]) -> None:
        if query["hangs"]:
            if self._hanging is not None:
                send(client.writer, {"asked_by": self._hanging})
                return
            self._hanging = client.rank
        async with self._asking:
            self._num_asked += 1
            asked = [other for other in self._clients if other.link == "open"]
            for other in self._clients:
                other.answer = None
                send(other.writer, {"query": query, "answer": self._num_asked})
            with contextlib.suppress(TimeoutError):  # silent ranks are shown as such
                async with asyncio.timeout(ANSWER_S):
                    while any(other.link == "open" and other.answer is None for other in asked):
                        await asyncio.sleep(0.01)
            send(client.writer, {"peer_states": [asdict(other.peer_state()) for other in self._clients]})


def send(writer: asyncio.StreamWriter | None, message: dict[str, Any]) -> None:
    """Sends to a peer that may be gone, which the reader of its connection detects."""
    if writer is not None and not writer.is_closing():
        with contextlib.suppress(OSError):
            writer.write(json.dumps(message).encode() + b"\n")


def log_fault_of(task: asyncio.Task[None], words: str) -> None:
    """Logs the error of a task, if it fails."""

    def on_end(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.error(words, exc_info=task.exception())

    task.add_done_callback(on_end)


def parse_peer_states(answer: dict[str, Any] | None) -> list[PeerState] | None:
    """Returns the decoded answer of the server; None if it is not valid."""
    if answer is None:
        return None
    given = answer["peer_states"]
    return [PeerState(**{**s, "state": RankState(**s["state"]) if s["state"] else None}) for s in given]


async def join(
    endpoint: Endpoint, state: RankState, seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """Connects to the server at the first of its addresses that answers; returns None if none does.

    An address may belong to another host elsewhere (a container's bridge), so both sides send the token.
    """
    for address in endpoint.addresses:
        writer = None
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(address, endpoint.port, limit=ANSWER_BYTES)
                send(writer, {"token": endpoint.token, "state": asdict(state)})
                if json.loads(await read_line(reader))["welcome"] == endpoint.token:
                    return reader, writer
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            if writer is not None:
                writer.close()
    return None


def _allow_open_files(num: int) -> None:
    """Raises the limit on open files (connections count), by default 1,024 on many systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num:
        most = num if hard == resource.RLIM_INFINITY else min(num, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
