"""The rendezvous of hosts through a store, if the command was typed on each of them with its --shard-id.

1. each node claims its number, "shard k"; the first one's "job", the numbers of nodes and processes, applies to all
2. shard 0 listens, and gives its addresses in its claim; the others try them, and write the one
   that they reach as "reached k"
3. shard 0 sees all of that: the outcome is "all here"
The processes of all nodes then start as those of --nodes do, whose --master-addr is now known: once they run, the store
only says that the run id is in use. The last node to leave removes what is there.
"""

import json
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

from partial_fc import printable
from partial_fc.comm.launch.detect import StartError
from partial_fc.comm.launch.rendezvous import ALL_HERE, Rendezvous, listed
from partial_fc.comm.launch.stores import FolderStore, Store

_PROBE_S = 2.0  # for one address of shard 0


@dataclass(frozen=True)
class Node:
    """A host of the run, as described to the others."""

    shard_id: int
    num_shards: int
    num_gpus: int
    host: str
    process: int
    since: str
    token: str  # sent to all that connect: the address may belong to another host elsewhere (a container's bridge)
    secret: str  # shard 0's is that of the processes, which only they read (auth/handshake.py)
    addresses: list[str]
    port: int

    @classmethod
    def here(
        cls, shard_id: int, num_shards: int, num_gpus: int, addresses: list[str], listening: socket.socket | None
    ) -> "Node":
        """Returns this host's Node."""
        port = listening.getsockname()[1] if listening else 0
        who = (socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"))
        token, secret = secrets.token_hex(16), secrets.token_hex(32)
        return cls(shard_id, num_shards, num_gpus, *who, token, secret, addresses, port)

    @classmethod
    def parse(cls, text: bytes, where: str) -> "Node":
        """Returns the Node in `text`. Raises StartError if it is not one of ours."""
        try:
            node = cls(**json.loads(text))
            right = all(isinstance(getattr(node, name), kind) for name, kind in _TYPES.items())
            if right and 0 <= node.port < 65536 and all(isinstance(address, str) for address in node.addresses):
                return node
        except (ValueError, TypeError, RecursionError):
            pass
        raise StartError(f"{where} holds {text[:80]!r}, which no host of a run has written")

    def __str__(self) -> str:
        return f"shard {self.shard_id}: {self.host} (process {self.process}, since {self.since})"


_TYPES = {"shard_id": int, "num_shards": int, "num_gpus": int, "host": str, "process": int, "since": str}
_TYPES |= {"token": str, "secret": str, "addresses": list, "port": int}


@dataclass(frozen=True)
class Peers:
    """The address of shard 0 that this host reaches, and this host's own address on that path."""

    master_addr: str
    master_port: int
    own_addr: str
    secret: str


@contextmanager
def meet(store: Store, me: Node, listening: socket.socket | None, timeout_s: float) -> Iterator[Peers]:
    """Yields the run's hosts once all have joined; the run id is in use until the end of the block.

    listening: shard 0's socket. Raises StartError, on every host, within timeout_s seconds of its start if hosts are
    missing; at once if they contradict each other or the run id is in use.
    """
    meeting = _Meeting(store, me, listening, timeout_s)
    try:
        with meeting.errors():
            peers = meeting.peers()
        yield peers
    finally:
        meeting.leave()


class _Meeting(Rendezvous):
    """One node at the rendezvous."""

    store: Store

    def __init__(self, store: Store, me: Node, listening: socket.socket | None, timeout_s: float):
        super().__init__(store, "shard", me.shard_id, me.num_shards, str(me), store.name, timeout_s)
        self._me, self._listening = me, listening
        self._mine = json.dumps(asdict(me))
        self._reached = [f"reached {number}" for number in range(1, me.num_shards)]
        self._peers: Peers | None = None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Reports an error in the block to the others; errors name this host, or the store if that has failed."""
        who = f"shard {self._me.shard_id} of {self._me.num_shards} on {self._me.host}"
        try:
            yield
        except StartError as error:
            raise StartError(f"{who}: {printable.name(str(error)[:4000])}") from None
        except self.store.errors as error:
            raise StartError(f"{who}: {self.place} failed while the hosts gathered: {error}") from None
        except BaseException:  # Ctrl-C, a scheduler's signal
            with suppress(*self.store.errors):
                self.decide(f"{self._me} was stopped while the others waited")
            raise

    def peers(self) -> Peers:
        """Waits for all nodes. Raises StartError if the outcome is not "all here"."""
        if outcome := self.outcome:
            raise StartError(self._in_use(outcome))
        if problem := self._claim():
            self.decide(problem)
            raise StartError(problem)
        outcome = self.wait(self.timeout_s)
        if outcome != ALL_HERE:
            raise StartError(outcome)
        if self._listening:
            address = self.read("reached 1").decode()  # usable by others
            return Peers(address, self._me.port, address, self._me.secret)
        if self._peers is None:
            raise StartError(
                f"{self.place} says that all are here, but this host has not found shard 0: another one's outcome"
            )
        return self._peers

    def _claim(self) -> str:
        """Claims this host's number; returns the error, or ""."""
        me, name = self._me, self.place
        job = Node.parse(self.store.compare_set("job", "", self._mine), f"{name}: job")
        if (job.num_shards, job.num_gpus) != (me.num_shards, me.num_gpus):
            return (
                f"the hosts disagree: {job} says {job.num_shards} shards with {job.num_gpus} processes each; {me} says "
                f"{me.num_shards} with {me.num_gpus}. Give all the same --num-shards and --num-gpus (--gpus), and "
                "every run a --run-id of its own"
            )
        holder = self.claim(self._mine)
        if holder != self._mine.encode():
            other = Node.parse(holder, f"{name}: {self.own_key}")
            return (
                f"--shard-id {me.shard_id} is there twice: {other}; {me}. Give each host a number of its own, and "
                "every run a --run-id of its own. If the first does not run any more, it was killed; "
                f"{self.store.leftover}"
            )
        return ""

    def read(self, key: str) -> bytes:
        return self.store.read(key) or b""

    def look(self) -> str:
        if self._listening:
            answer(self._listening, self._me.token)
            return ALL_HERE if self.store.check([*self.keys, *self._reached]) else ""
        if self._peers is None and (first := self.read("shard 0")):
            self._peers = reach(Node.parse(first, f"{self.place}: shard 0"))
            if self._peers:
                self.store.set(f"reached {self._me.shard_id}", self._peers.master_addr)
        return ""

    def absent(self) -> list[str]:
        """Returns the missing nodes, and those that do not reach shard 0."""
        absent = super().absent()
        if "shard 0" in absent:
            return absent
        far = [self.keys[n] for n, key in enumerate(self._reached, 1) if not self.store.check([key])]
        return absent + [f"a connection from {key} to shard 0" for key in far if key not in absent]

    def described(self, claim: bytes, key: str) -> str:
        return str(Node.parse(claim, self.place))

    def remedy(self, absent: list[str]) -> str:
        if any(text.startswith("shard") for text in absent):
            is_folder = isinstance(self.store, FolderStore)
            same = "folder? A local folder, as /tmp mostly is, is another one on each host" if is_folder else "Redis?"
            return (
                "Was the command started on every host, each with its own --shard-id, all with the same --run-id and "
                f"the same {same}"
            )
        first = Node.parse(self.read("shard 0"), self.place)
        return (
            f"Shard 0 listens at port {first.port} of {', '.join(first.addresses)}: is a firewall between the hosts, "
            "or do they share no network? --network-interface chooses one, --master-port a port that is open"
        )

    def _in_use(self, outcome: str) -> str:
        holders = self.present() or ["no host is there any more"]
        how = "is in use" if outcome == ALL_HERE else f"was tried and failed ({outcome})"
        return (
            f"the run id {how}, says {self.place}; {listed(holders)}. Give this run another --run-id, the same on "
            f"all hosts. If those do not run any more, they were killed; {self.store.leftover}"
        )

    def leave(self) -> None:
        """Removes this host's keys, and all keys if it is the last host."""
        store, me = self.store, self._me
        try:
            # Read again, not remembered: Ctrl-C may have come just after the claim was written.
            if self.read(self.own_key) == self._mine.encode():
                store.delete_key(f"reached {me.shard_id}")
                store.delete_key(self.own_key)
            # An outcome stays for the others, and so does one beside the claim of a killed node.
            if not any(map(self.read, self.keys)):
                self.forget()
                store.delete_key("job")
        except store.errors as error:
            print(f"note: {me} cannot leave {store.name}: {error}; {store.leftover}", file=sys.stderr, flush=True)
        finally:
            store.close()


def answer(listening: socket.socket, token: str) -> None:
    """Sends the token, which identifies this listener, to all that have connected."""
    while select.select([listening], [], [], 0)[0]:
        with suppress(OSError), listening.accept()[0] as connection:
            connection.sendall(token.encode())


def reach(first: Node) -> Peers | None:
    """Tries the addresses of shard 0; returns None if none answers."""
    for address in first.addresses:
        with suppress(OSError, UnicodeError), socket.create_connection((address, first.port), _PROBE_S) as connection:
            if connection.recv(len(first.token), socket.MSG_WAITALL) == first.token.encode():
                return Peers(address, first.port, connection.getsockname()[0], first.secret)
    return None
