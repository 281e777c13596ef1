"""The search for shard 0, if the command was typed on several hosts, on each with its own --shard-id.

1. shard 0 announces its addresses and port in a store (stores.py) under the run's id, and starts its processes
2. the others read that, and take the first address at which somebody listens
3. they start their processes as --nodes does, with that address as --master-addr

Missing hosts, and hosts that contradict each other, are found by the ranks (meet_ranks.py).
"""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass

from partial_fc import printable
from partial_fc.comm.launch.detect import StartError

from .stores import Store

_PROBE_S = 2.0  # for one address of shard 0
_POLL_S = 0.2


@dataclass(frozen=True)
class Shard0:
    """The announcement of shard 0."""

    who: str
    addresses: list[str]
    port: int

    @classmethod
    def here(cls, reachable: list[str], port: int) -> "Shard0":
        """Returns the announcement of this process. reachable: addresses of this host, likely ones first."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        who = f"shard 0: {socket.gethostname()} (process {os.getpid()}, since {since})"
        return cls(who, reachable, port)

    @classmethod
    def parse(cls, text: bytes, where: str) -> "Shard0":
        """Returns the announcement in `text`. Raises StartError if it is none."""
        with suppress(ValueError, TypeError, RecursionError):
            found = cls(**json.loads(text))
            right = isinstance(found.who, str) and isinstance(found.addresses, list)
            if right and 0 < found.port < 65536 and all(isinstance(address, str) for address in found.addresses):
                return found
        raise StartError(f"{where} holds {text[:80]!r}, which no host of a run has written")


@contextmanager
def announced(store: Store, shard: Shard0) -> Iterator[None]:
    """Announces shard 0 until the end of the block. Raises StartError if the run id is in use."""
    with closing(store):
        with _errors(store, "shard 0"):
            other = store.announce(json.dumps(asdict(shard)))
            if other is not None:
                raise StartError(
                    f"the run id is in use, says {store.name}: {Shard0.parse(other, store.name).who}. Give this run "
                    "another --run-id, the same on all hosts. If that process does not run any more, it was killed; "
                    f"{store.leftover}"
                )
        yield


def find(store: Store, shard_id: int, timeout_s: float) -> tuple[str, int]:
    """Returns address and port of rank 0, once it answers. Raises StartError after timeout_s seconds."""
    shard, last_try, deadline = None, False, time.monotonic() + timeout_s
    with closing(store), _errors(store, f"shard {shard_id}"):
        print(f"shard {shard_id} looks for shard 0 at {store.name}", file=sys.stderr, flush=True)
        while not last_try:
            last_try = time.monotonic() >= deadline
            if (text := store.read()) is not None:
                shard = Shard0.parse(text, store.name)
                for address in shard.addresses:
                    # An address may be another host's here.
                    with suppress(OSError, ValueError):
                        socket.create_connection((address, shard.port), _PROBE_S).close()
                        return address, shard.port
            time.sleep(_POLL_S)
        if shard is None:
            raise StartError(
                f"shard 0 did not announce itself in {store.name} within {timeout_s:g} s. Was the command started on "
                f"every host, each with its own --shard-id, all with the same --run-id and {store.same}?"
            )
        raise StartError(
            f"{shard.who} does not answer at port {shard.port} of {', '.join(shard.addresses)} within {timeout_s:g} s. "
            "Is a firewall between the hosts, or do they share no network? --network-interface chooses one, "
            f"--master-port a port that is open. If another run has this --run-id, use another; {store.leftover}"
        )


@contextmanager
def _errors(store: Store, who: str) -> Iterator[None]:
    """Names this host in errors of the block, and the store if that has failed."""
    try:
        yield
    except StartError as error:
        raise StartError(f"{who} on {socket.gethostname()}: {printable.name(str(error)[:4000])}") from None
    except store.errors as error:
        raise StartError(f"{who} on {socket.gethostname()}: {store.name} failed: {error}") from None
