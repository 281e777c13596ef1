"""Hosts on which somebody has typed the command, each with its --shard-id, find each other through a store.

Steps, all through keys of that store:
1. each host claims its number, "shard k"; the first one's numbers of hosts and processes, "job", hold for all
2. shard 0 listens, and says in its claim where; the others look at which of its addresses they reach it, and write
   that as "reached k"
3. shard 0 sees all of that and writes the verdict "all here"; or some host writes what is wrong; the first verdict
   holds
The processes of all hosts then start as those of --nodes do, whose --master-addr is now known: once they run, the store
only says that the run id is in use. The last host to leave removes what is there.
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
from partial_fc.comm.launch.stores import FolderStore, RedisStore

_ALL_HERE = "all here"
_POLL_S = 0.1
_NOTICE_S = 10.0  # after which a host prints for whom it waits
_PROBE_S = 2.0  # for one address of shard 0

Store = RedisStore | FolderStore


@dataclass(frozen=True)
class Shard:
    """A host of the run, as it tells the others about itself."""

    shard_id: int
    num_shards: int
    num_gpus: int
    host: str
    process: int
    since: str
    token: str  # what it says to whoever connects: an address may be another host's elsewhere (a container's bridge)
    secret: str  # shard 0's is that of the processes, which no stranger reads (strangers/gate.py)
    addresses: list[str]
    port: int

    @classmethod
    def here(
        cls, shard_id: int, num_shards: int, num_gpus: int, addresses: list[str], listening: socket.socket | None
    ) -> "Shard":
        port = listening.getsockname()[1] if listening else 0
        who = (socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"))
        token, secret = secrets.token_hex(16), secrets.token_hex(32)
        return cls(shard_id, num_shards, num_gpus, *who, token, secret, addresses, port)

    @classmethod
    def parse(cls, text: bytes, where: str) -> "Shard":
        """Raises StartError where another program, or a person, has written something else."""
        try:
            found = cls(**json.loads(text))
            right = all(isinstance(getattr(found, name), kind) for name, kind in _TYPES.items())
            if right and 0 <= found.port < 65536 and all(isinstance(address, str) for address in found.addresses):
                return found
        except (ValueError, TypeError, RecursionError):
            pass
        raise StartError(f"{where} holds {text[:80]!r}, which no host of a run has written")

    def __str__(self) -> str:
        return f"shard {self.shard_id}: {self.host} (process {self.process}, since {self.since})"


_TYPES = {"shard_id": int, "num_shards": int, "num_gpus": int, "host": str, "process": int, "since": str}
_TYPES |= {"token": str, "secret": str, "addresses": list, "port": int}


@dataclass(frozen=True)
class Met:
    """Where shard 0 listens, as this host reaches it, and by which of its own addresses this one does."""

    master_addr: str
    master_port: int
    own_addr: str
    secret: str


@contextmanager
def meeting(store: Store, me: Shard, listening: socket.socket | None, timeout_s: float) -> Iterator[Met]:
    """The run's hosts, once all are there; the run id is in use until the end of the block.

    listening: shard 0's socket. Raises StartError, on every host, within timeout_s seconds of its start where not all
    have come; at once where they contradict each other or the run id is in use.
    """
    try:
        with _told(store, me):
            if verdict := store.read("verdict"):
                raise StartError(_in_use(store, me, verdict.decode(errors="replace")))
            if problem := _claim(store, me):
                _write_verdict(store, problem)
                raise StartError(problem)
            met = _wait(store, me, listening, timeout_s)
        yield met
    finally:
        _leave(store, me)


@contextmanager
def _told(store: Store, me: Shard) -> Iterator[None]:
    """The others hear it where this host stops waiting; errors name the host, and the store where that has failed."""
    who = f"shard {me.shard_id} of {me.num_shards} on {me.host}"
    try:
        yield
    except StartError as error:
        raise StartError(f"{who}: {printable.name(str(error)[:4000])}") from None
    except store.errors as error:
        raise StartError(f"{who}: {store.name} failed while the hosts gathered: {error}") from None
    except BaseException:  # Ctrl-C, a scheduler's signal
        with suppress(*store.errors):
            _write_verdict(store, f"{me} was stopped while the others waited")
        raise


def _claim_of(me: Shard) -> str:
    return json.dumps(asdict(me))


def _claim(store: Store, me: Shard) -> str:
    """Writes this host's number; returns what is wrong, or nothing."""
    mine = _claim_of(me)
    job = Shard.parse(store.compare_set("job", "", mine), f"{store.name}: job")
    if (job.num_shards, job.num_gpus) != (me.num_shards, me.num_gpus):
        return (
            f"the hosts disagree: {job} says {job.num_shards} shards with {job.num_gpus} processes each; {me} says "
            f"{me.num_shards} with {me.num_gpus}. Give all the same --num-shards and --num-gpus (--gpus), and every "
            "run a --run-id of its own"
        )
    holder = store.compare_set(f"shard {me.shard_id}", "", mine)
    if holder != mine.encode():
        other = Shard.parse(holder, f"{store.name}: shard {me.shard_id}")
        return (
            f"--shard-id {me.shard_id} is there twice: {other}; {me}. Give each host a number of its own, and every "
            f"run a --run-id of its own. If the first does not run any more, it was killed; {store.leftover}"
        )
    return ""


def _wait(store: Store, me: Shard, listening: socket.socket | None, timeout_s: float) -> Met:
    """Waits for the verdict, which shard 0 writes, and any host where time is over."""
    started = time.monotonic()
    notice_at = started + _NOTICE_S
    met: Met | None = None
    while not (verdict := store.read("verdict")):
        if listening:
            _answer(listening, me.token)
            shards, reached = _keys("shard", me.num_shards), _keys("reached", me.num_shards)[1:]
            if store.check([*shards, *reached]):
                verdict = _write_verdict(store, _ALL_HERE)
                break
        elif met is None and (first := store.read("shard 0")):
            met = _reach(Shard.parse(first, f"{store.name}: shard 0"))
            if met:
                store.set(f"reached {me.shard_id}", met.master_addr)
        now = time.monotonic()
        if now > started + timeout_s:
            verdict = _write_verdict(store, _missing(store, me, timeout_s))
            break
        if now > notice_at:
            notice_at = started + timeout_s + 1
            print(f"{me} waits in {store.name} for {', '.join(_absent(store, me))}", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
    if verdict != _ALL_HERE.encode():
        raise StartError(verdict.decode(errors="replace"))
    if listening:
        address = store.get("reached 1").decode()  # one that others can use
        return Met(address, me.port, address, me.secret)
    if met is None:
        raise StartError(
            f"{store.name} says that all are here, but this host has not found shard 0: another one's verdict"
        )
    return met


def _answer(listening: socket.socket, token: str) -> None:
    """Says to all that have connected who listens here."""
    while select.select([listening], [], [], 0)[0]:
        with suppress(OSError), listening.accept()[0] as connection:
            connection.sendall(token.encode())


def _reach(first: Shard) -> Met | None:
    for address in first.addresses:
        with suppress(OSError, UnicodeError), socket.create_connection((address, first.port), _PROBE_S) as connection:
            if connection.recv(len(first.token), socket.MSG_WAITALL) == first.token.encode():
                return Met(address, first.port, connection.getsockname()[0], first.secret)
    return None


def _missing(store: Store, me: Shard, timeout_s: float) -> str:
    """The verdict where not all have come: who has, who has not, and what may be wrong."""
    absent = _absent(store, me)
    claims = [store.read(key) for key in _keys("shard", me.num_shards)]
    present = [str(Shard.parse(claim, store.name)) for claim in claims if claim]
    if any(text.startswith("shard") for text in absent):
        remedy = "Was the command started on every host, each with its own --shard-id, all with the same --run-id" + (
            " and the same folder? A local folder, as /tmp mostly is, is another one on each host"
            if isinstance(store, FolderStore)
            else " and the same Redis?"
        )
    else:
        first = Shard.parse(claims[0] or b"", store.name)
        remedy = (
            f"Shard 0 listens at port {first.port} of {', '.join(first.addresses)}: is a firewall between the hosts, "
            "or do they share no network? --network-interface chooses one, --master-port a port that is open"
        )
    return (
        f"{_listed(absent)} did not come within {timeout_s:g} s to {store.name}. There are: {_listed(present)}. "
        f"{remedy}"
    )


def _absent(store: Store, me: Shard) -> list[str]:
    """Who has not come, and who has, but does not reach shard 0."""
    numbers = range(me.num_shards)
    absent = [n for n in numbers if not store.check([f"shard {n}"])]
    far = [n for n in numbers if n not in (0, *absent) and not store.check([f"reached {n}"])] if 0 not in absent else []
    return [f"shard {n}" for n in absent] + [f"a connection from shard {n} to shard 0" for n in far]


def _in_use(store: Store, me: Shard, verdict: str) -> str:
    claims = [store.read(key) for key in _keys("shard", me.num_shards)]
    holders = [str(Shard.parse(claim, store.name)) for claim in claims if claim] or ["no host is there any more"]
    how = "is in use" if verdict == _ALL_HERE else f"was tried and failed ({verdict})"
    return (
        f"the run id {how}, says {store.name}; {_listed(holders)}. Give this run another --run-id, the same on all "
        f"hosts. If those do not run any more, they were killed; {store.leftover}"
    )


def _write_verdict(store: Store, text: str) -> bytes:
    """Makes `text` the verdict, unless there is one; returns that which holds."""
    return store.compare_set("verdict", "", text)


def _leave(store: Store, me: Shard) -> None:
    """Removes what this host has written, and what all have where it is the last one."""
    try:
        # Looked up, not remembered: Ctrl-C may have come just after the claim was there.
        if store.read(f"shard {me.shard_id}") == _claim_of(me).encode():
            store.delete_key(f"reached {me.shard_id}")
            store.delete_key(f"shard {me.shard_id}")
        # A verdict stays for the others, and where a killed one has left its claim.
        if not any(store.check([key]) for key in _keys("shard", me.num_shards)):
            store.delete_key("verdict")
            store.delete_key("job")
    except store.errors as error:
        print(f"note: {me} cannot leave {store.name}: {error}; {store.leftover}", file=sys.stderr, flush=True)
    finally:
        store.close()


def _keys(kind: str, num: int) -> list[str]:
    return [f"{kind} {number}" for number in range(num)]


def _listed(items: list[str], most: int = 16) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
