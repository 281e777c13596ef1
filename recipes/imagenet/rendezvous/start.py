"""A start on several hosts without a launcher: the same command on each, with its own --shard-id."""

import os
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from partial_fc import comm
from partial_fc.comm.launch import addresses
from partial_fc.comm.launch.start import spawn_here
from partial_fc.errors import package
from partial_fc.flags import LaunchFlags, check_numbers, flag, is_given
from partial_fc.flags.facts import PORT, PROCESSES, Basic, Counts, In, may_change

from . import shard0, stores


@may_change
@dataclass(frozen=True, kw_only=True)
class RendezvousFlags:
    """Several hosts without a launcher: the same command on each, with its own --shard-id. The others find
    shard 0 through a Redis server, or else through a folder that all of them see."""

    num_shards: Annotated[int, In(PROCESSES), Basic, Counts] = 1
    """Hosts of the run."""
    shard_id: Annotated[int, Basic] = 0
    """Number of this host among --num-shards, from 0."""
    run_id: Annotated[str | None, Basic] = None
    """A name for this run, the same on all hosts, and of no other run at the same time."""
    redis_host: str | None = None
    """Host of the Redis server. Its password comes from REDIS_PASSWORD in the environment, or a file; a user's name
    from REDIS_USERNAME. rediss://HOST?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE for one that speaks TLS."""
    redis_port: Annotated[int, In(PORT)] = 6379
    redis_password_file: Path | None = None
    """A file that contains only the password."""
    file_store_path: Annotated[Path, Basic] = Path("/tmp")
    """Without --redis-host: a folder that all hosts see (NFS). /tmp serves shards of one host only."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0 <= self.shard_id < self.num_shards:
            raise ValueError(
                f"--shard-id is {self.shard_id}, of --num-shards {self.num_shards}; shards are numbered from 0 to "
                f"{self.num_shards - 1}"
            )
        if self.run_id is not None and not 0 < len(self.run_id.encode()) <= 64:
            raise ValueError(f"--run-id {self.run_id!r}: expected 1 to 64 bytes")


def start_shard(rendezvous: RendezvousFlags, launch: LaunchFlags) -> int | None:
    """Starts this host's processes, once shard 0 is found; returns their exit status. None: one shard, or another
    launcher, needs no rendezvous. Raises ValueError if flags contradict each other or the launcher, StartError if hosts
    do not find each other."""
    if comm.started_here():
        return None
    by = comm.detect()
    if by.backend != "single":
        _compare(rendezvous, by)
    if rendezvous.num_shards == 1 or by.backend != "single":
        # The folder may also hold a run's checkpoints, and a run id is only a name.
        given = [name for name in ("redis_host", "redis_password_file") if is_given(rendezvous, name)]
        if given:
            why = f"{by.launcher} says where the others are" if by.launcher else "one shard meets no others"
            print(f"note: {', '.join(map(flag, given))} without effect: {why}", file=sys.stderr, flush=True)
        return None
    if rendezvous.run_id is None:
        raise ValueError(
            f"--num-shards {rendezvous.num_shards} needs --run-id: a name for this run, the same on all hosts, for "
            "example --run-id resnet-1"
        )
    for name in ("nodes", "nr", "master_addr"):
        if is_given(launch, name):
            raise ValueError(f"{flag(name)} and --num-shards are two ways to start a run: give one of them")
    return _run_shard(rendezvous, launch, rendezvous.run_id)


def _run_shard(rendezvous: RendezvousFlags, launch: LaunchFlags, run_id: str) -> int:
    num, number = rendezvous.num_shards, rendezvous.shard_id
    store = _open_store(rendezvous, run_id, launch.start_timeout)
    if number:
        address, port = shard0.find(store, number, launch.start_timeout)
        environ = dict(os.environ)
        # Gloo listens at the address over which this host reaches shard 0 (and there, see meet_ranks.py): its default
        # is that of the host's name, on Debian 127.0.1.1.
        if launch.network_interface is None and (way := addresses.interface_of(addresses.towards(address))):
            environ.setdefault("GLOO_SOCKET_IFNAME", way)
        return spawn_here(launch, num, number, address, port, environ=environ)
    reachable = addresses.reachable(launch.network_interface)
    with _listen(reachable[0] if launch.network_interface else "", launch.master_port) as listening:
        port = listening.getsockname()[1]
        within = partial(shard0.announced, store, shard0.Shard0.here(reachable, port))
        own = reachable[0] if len(reachable) == 1 else addresses.ANY  # of several the others choose
        return spawn_here(launch, num, 0, own, port, listening=listening, within=within)


def _compare(rendezvous: RendezvousFlags, by: comm.Launch) -> None:
    """Raises ValueError if the flags contradict the launcher."""
    hosts = {"num_shards": by.size // by.local_size, "shard_id": by.rank // by.local_size}
    for name, value in hosts.items():
        if is_given(rendezvous, name) and getattr(rendezvous, name) != value:
            raise ValueError(
                f"{flag(name)} {getattr(rendezvous, name)}, but {by.launcher} has started this process as rank "
                f"{by.rank} of {by.size}, {by.local_size} on each host, which makes it {value}: leave --num-shards "
                f"and --shard-id away, or start without {by.launcher}"
            )


def _open_store(flags: RendezvousFlags, run_id: str, timeout_s: float) -> stores.Store:
    if flags.redis_host is None:
        return stores.FileStore(flags.file_store_path, run_id)
    package("redis", "--redis-host, unlike --file-store-path,", "redis")
    password = os.environ.get("REDIS_PASSWORD")
    if flags.redis_password_file is not None:
        password = flags.redis_password_file.read_text(encoding="utf-8").strip("\r\n")
    return stores.open_redis(
        flags.redis_host,
        flags.redis_port,
        run_id,
        timeout_s,
        username=os.environ.get("REDIS_USERNAME"),
        password=password,
    )


def _listen(address: str, port: int | None) -> socket.socket:
    """Returns rank 0's socket, opened now so that the port cannot be taken meanwhile."""
    try:
        return socket.create_server((address, port or 0), backlog=128)
    except OSError as error:
        raise ValueError(f"--master-port {port}: cannot listen there on {socket.gethostname()}: {error}") from None
