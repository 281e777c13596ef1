"""The flags with which processes that are started by hand on several hosts find each other, named as Caffe2's."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import psutil

from partial_fc import comm
from partial_fc.comm.auth.handshake import SECRET
from partial_fc.comm.launch import spawn
from partial_fc.comm.watch.status_server import local_addresses
from partial_fc.flags.facts import Basic, Counts, In, may_change
from partial_fc.flags.launch import LaunchFlags
from partial_fc.flags.numbers import PORT, PROCESSES, check_numbers, flag
from partial_fc.flags.training import is_given

if TYPE_CHECKING:
    from partial_fc.comm.launch.meeting import Met, Store


@may_change
@dataclass(frozen=True, kw_only=True)
class RendezvousFlags:
    """Several hosts without a launcher: the same command on each, with its own --shard-id. They meet in a Redis server,
    or else in a folder that all of them see."""

    num_shards: Annotated[int, In(PROCESSES), Basic, Counts] = 1
    """Hosts of the run."""
    shard_id: Annotated[int, Basic] = 0
    """Number of this host among --num-shards, from 0."""
    run_id: Annotated[str | None, Basic] = None
    """A name for this run, the same on all hosts and of no other run that goes on."""
    redis_host: str | None = None
    """Host of the Redis server. Its password comes from REDIS_PASSWORD in the environment, or a file; a user's name
    from REDIS_USERNAME."""
    redis_port: Annotated[int, In(PORT)] = 6379
    redis_password_file: Path | None = None
    """A file with nothing but the password."""
    redis_tls: bool = False
    """Speak TLS to the server, and check its certificate."""
    redis_ca: Path | None = None
    """Certificates of those who may have signed the server's. none: those of the system."""
    redis_cert: Path | None = None
    """Our certificate, where the server asks for one (`tls-auth-clients`), with --redis_key."""
    redis_key: Path | None = None
    file_store_path: Annotated[Path, Basic] = Path("/tmp")
    """Without --redis-host: a folder that all hosts see (NFS), in which they meet. /tmp serves shards of one host
    only."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0 <= self.shard_id < self.num_shards:
            raise ValueError(
                f"--shard-id is {self.shard_id}, of --num-shards {self.num_shards}; shards are numbered from 0 to "
                f"{self.num_shards - 1}"
            )
        if self.run_id is not None and not 0 < len(self.run_id.encode()) <= 64:
            raise ValueError(f"--run-id {self.run_id!r}: expected 1 to 64 bytes")
        if (self.redis_cert is None) != (self.redis_key is None):
            raise ValueError("--redis-cert and --redis-key go together")
        for name in ("redis_ca", "redis_cert", "redis_key"):
            if getattr(self, name) is not None and not self.redis_tls:
                raise ValueError(f"{flag(name)} goes with --redis-tls")

    def start(self, launch: LaunchFlags) -> int | None:
        """Meets the other hosts, starts the launch.gpus processes of this one, each with the command line of this
        process, and waits for their end. With one shard, and under a launcher, nothing is met and nothing written.

        Returns the exit status to end with; none: this process is itself one of those that train, or `launch` is to
        start them. Raises ValueError for flags that contradict each other or the launcher, StartError where the hosts
        do not meet.
        """
        if comm.started_here():
            return None
        started = comm.detect()
        if started.backend != "single":
            self._compare(started)
        if self.num_shards == 1 or started.backend != "single":
            why = f"{started.launcher} says where the others are" if started.launcher else "one shard meets no others"
            self._tell_vain(why)
            return None
        self._check_complete(launch)
        with _ending_by_signals():
            return self._run(launch)

    def _run(self, launch: LaunchFlags) -> int:
        from partial_fc.comm.launch import meeting  # needs torch, which --help does without

        addresses = local_addresses(launch.network_interface)
        listens = self.shard_id == 0
        address = addresses[0] if launch.network_interface else ""
        with _listen(address, launch.master_port) if listens else nullcontext() as listening:
            own = addresses if listens else []
            me = meeting.Shard.here(self.shard_id, self.num_shards, launch.gpus, own, listening)
            with meeting.meeting(self._open_store(launch.start_timeout), me, listening, launch.start_timeout) as met:
                return spawn.run(
                    [sys.executable, *sys.orig_argv[1:]],
                    nodes=self.num_shards,
                    gpus=launch.gpus,
                    nr=self.shard_id,
                    master_addr=met.master_addr,
                    master_port=met.master_port,
                    listening=listening,
                    environ=_environment(met, launch.network_interface),
                )

    def _compare(self, started: comm.Launch) -> None:
        """Raises ValueError where the flags say something else than the launcher."""
        hosts = {"num_shards": started.size // started.local_size, "shard_id": started.rank // started.local_size}
        for name, found in hosts.items():
            if is_given(self, name) and getattr(self, name) != found:
                raise ValueError(
                    f"{flag(name)} {getattr(self, name)}, but {started.launcher} has started this process as rank "
                    f"{started.rank} of {started.size}, {started.local_size} on each host, which makes it {found}: "
                    f"leave --num-shards and --shard-id away, or start without {started.launcher}"
                )

    def _tell_vain(self, why: str) -> None:
        # The folder is also where Caffe2's command lines have their checkpoints, and a run id is only a name.
        given = [name for name in ("redis_host", "redis_password_file", "redis_tls") if is_given(self, name)]
        if given:
            print(f"note: {', '.join(map(flag, given))} without effect: {why}", file=sys.stderr, flush=True)

    def _check_complete(self, launch: LaunchFlags) -> None:
        if self.run_id is None:
            raise ValueError(
                f"--num-shards {self.num_shards} needs --run-id: a name for this run, the same on all hosts, for "
                "example --run-id resnet-1"
            )
        for name in ("nodes", "nr", "master_addr"):
            if is_given(launch, name):
                raise ValueError(f"{flag(name)} and --num-shards are two ways to start a run: give one of them")

    def _open_store(self, timeout_s: float) -> "Store":
        from partial_fc.comm.launch import stores

        assert self.run_id is not None
        if self.redis_host is None:
            return stores.open_folder(self.file_store_path, self.run_id)
        try:
            import redis  # noqa: F401
        except ImportError:
            raise ValueError(
                "--redis-host needs the package redis: `pip install redis` on each host, or let them meet in a folder "
                "(--file-store-path)"
            ) from None
        password = os.environ.get("REDIS_PASSWORD")
        if self.redis_password_file is not None:
            password = self.redis_password_file.read_text(encoding="utf-8").strip("\r\n")
        return stores.open_redis(
            self.redis_host,
            self.redis_port,
            self.run_id,
            timeout_s,
            username=os.environ.get("REDIS_USERNAME"),
            password=password,
            ssl=self.redis_tls,
            ssl_ca_certs=_text(self.redis_ca),
            ssl_certfile=_text(self.redis_cert),
            ssl_keyfile=_text(self.redis_key),
        )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _listen(address: str, port: int | None) -> socket.socket:
    """The socket that rank 0 gets: nobody else can take its port meanwhile."""
    try:
        return socket.create_server((address, port or 0), backlog=128)
    except OSError as error:
        raise ValueError(f"--master-port {port}: cannot listen there on {socket.gethostname()}: {error}") from None


def _environment(met: "Met", network_interface: str | None) -> dict[str, str]:
    """That of the processes. Gloo is to listen where this host and shard 0 have just reached each other: it would
    otherwise take the address of the host's own name, which on Debian is 127.0.1.1."""
    environ = {**os.environ, SECRET: met.secret}
    if network_interface is None and "GLOO_SOCKET_IFNAME" not in environ:
        for name, entries in psutil.net_if_addrs().items():
            if any(entry.address == met.own_addr for entry in entries):
                environ["GLOO_SOCKET_IFNAME"] = name
    return environ


@contextmanager
def _ending_by_signals() -> Iterator[None]:
    """What a scheduler sends ends the process so that it leaves nothing behind."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
