"""The flags of a start by hand on several hosts, named as Caffe2's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from partial_fc.flags.facts import Basic, Counts, In, may_change
from partial_fc.flags.numbers import PORT, PROCESSES, check_numbers, flag


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
    from REDIS_USERNAME."""
    redis_port: Annotated[int, In(PORT)] = 6379
    redis_password_file: Path | None = None
    """A file that contains only the password."""
    redis_tls: bool = False
    """Speak TLS to the server, and check its certificate."""
    redis_ca: Path | None = None
    """Authorities that may have signed the server's certificate. none: the system's."""
    redis_cert: Path | None = None
    """Our certificate, if the server asks for one (`tls-auth-clients`), with --redis_key."""
    redis_key: Path | None = None
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
        if (self.redis_cert is None) != (self.redis_key is None):
            raise ValueError("--redis-cert and --redis-key go together")
        for name in ("redis_ca", "redis_cert", "redis_key"):
            if getattr(self, name) is not None and not self.redis_tls:
                raise ValueError(f"{flag(name)} goes with --redis-tls")
