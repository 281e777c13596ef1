"""Where shard 0 of a run announces itself to the other hosts: a key of a Redis server, or a file that all of them see.

A store holds one short text, the announcement of one run. Nothing is unpickled.
"""

import os
import shlex
import stat
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from partial_fc.comm.launch.detect import StartError

if TYPE_CHECKING:
    import redis

EXPIRE_S = 60  # from the last refresh to the key's end, if the process ended without removing it
_ANSWER_S = 5.0  # of the server
_CONNECT_S = 10.0  # the server runs before the processes do, so a wrong name fails early
_MOST_BYTES = 1 << 16


class Store:
    """The place of one announcement; its methods raise `errors` if the server or the disk fails."""

    name: str
    """Its kind and place, for messages."""
    leftover: str
    """The removal of a killed run's announcement, for messages."""
    same: str
    """What all hosts must share, for messages."""
    errors: tuple[type[Exception], ...] = (OSError,)
    mine = b""
    """The announcement that this process wrote, if any."""

    def announce(self, text: str) -> bytes | None:
        """Writes the announcement, until `close`. Returns the one that is there already, if any; None: written."""
        raise NotImplementedError

    def read(self) -> bytes | None:
        """Returns the announcement; None if there is none."""
        raise NotImplementedError

    def remove(self) -> None:
        """Removes the announcement."""
        raise NotImplementedError

    def close(self) -> None:
        """Removes this process's announcement, not that of a run that took its place; prints a note if that fails."""
        try:
            if self.mine and self.read() == self.mine:
                self.remove()
        except self.errors as error:
            print(f"note: {self.name} cannot be removed: {error}; {self.leftover}", file=sys.stderr, flush=True)


class RedisStore(Store):
    """The key partial-fc:RUN_ID of a Redis server. It expires; a thread renews it until `close`."""

    same = "Redis"

    def __init__(self, client: "redis.Redis", run_id: str, expire_s: int = EXPIRE_S):
        from redis import RedisError

        self.errors = (RedisError, OSError)
        self._client = client
        self._expire_s = expire_s
        self.key = f"partial-fc:{run_id}"
        at = client.connection_pool.connection_kwargs
        self.name = f"Redis at {at['host']}:{at['port']}, key {self.key}"
        delete = f"redis-cli -h {at['host']} -p {at['port']} DEL {shlex.quote(self.key)}"
        self.leftover = f"the key expires {expire_s} s after the last process that uses it; `{delete}` removes it now"
        self._closed = threading.Event()

    def announce(self, text: str) -> bytes | None:
        if not self._client.set(self.key, text, nx=True, ex=self._expire_s):
            return self.read() or b""
        self.mine = text.encode()
        threading.Thread(target=self._refresh, name="redis-expire", daemon=True).start()
        return None

    def read(self) -> bytes | None:
        value: bytes | None = self._client.get(self.key)  # type: ignore[assignment]
        return value

    def remove(self) -> None:
        self._client.delete(self.key)

    def close(self) -> None:
        self._closed.set()
        super().close()
        self._client.close()

    def _refresh(self) -> None:
        """Renews the key. If the server fails now, the run does not need it any more: the key may only expire."""
        while not self._closed.wait(self._expire_s / 4):
            with suppress(*self.errors):
                self._client.expire(self.key, self._expire_s)


class FileStore(Store):
    """The file partial-fc-RUN_ID in a shared folder, which only its owner may read and write. Raises StartError if the
    folder cannot be written to."""

    same = "folder (a local one, as /tmp mostly is, is another one on each host)"

    def __init__(self, shared: Path, run_id: str):
        self._shared, self.path = shared, shared / f"partial-fc-{quote(run_id, safe='')}"
        self.name = f"file {self.path}"
        self.leftover = f"remove it on one host: `rm {shlex.quote(str(self.path.absolute()))}`"
        try:
            with tempfile.TemporaryFile(dir=shared) as probe:
                self._owner = os.fstat(probe.fileno()).st_uid  # of this user's files, for the folder's server
        except OSError as error:
            raise StartError(
                f"--file-store-path {shared}: {error.strerror} ({error.filename}). It must be a folder that this user "
                "may write to, the same one on all hosts (`ls -ld`, `mount` and `df` show it)"
            ) from None

    def announce(self, text: str) -> bytes | None:
        with tempfile.NamedTemporaryFile(mode="w", prefix=".partial-fc-", dir=self._shared) as written:  # of mode 600
            written.write(text)
            written.flush()
            try:
                os.link(written.name, self.path)  # only one process can create it, over NFS too
            except FileExistsError:
                return self.read() or b""
        self.mine = text.encode()
        return None

    def read(self) -> bytes | None:
        """Raises StartError if the file is another user's."""
        # Listing makes NFS look at the folder itself; otherwise it caches a missing name for up to a minute.
        try:
            if self.path.name not in os.listdir(self._shared):
                return None
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != self._owner or found.st_mode & 0o077:
                raise StartError(
                    f"{self.name} is not a file of this user (number {self._owner}) alone: is it another user's? Use "
                    "another --run-id or another --file-store-path"
                )
            return file.read(_MOST_BYTES)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def open_redis(host: str, port: int, run_id: str, timeout_s: float, **options: Any) -> RedisStore:
    """Returns the run's store, once the server answers; else raises StartError. host: a name, or a URL. options: of
    redis.Redis."""
    from redis import Redis, exceptions
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    where = f"Redis at {urlsplit(host).hostname if '://' in host else host}:{port}"
    # Servers older than 6 know no other protocol. The second try is for an idle connection that was closed.
    limits: dict[str, Any] = {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _ANSWER_S}
    options |= {"port": port, "protocol": 2, "retry": Retry(NoBackoff(), 1), **limits}
    client = Redis.from_url(host, **options) if "://" in host else Redis(host, **options)
    waited_s = min(timeout_s, _CONNECT_S)
    deadline = time.monotonic() + waited_s
    while True:
        try:
            client.exists(f"partial-fc:{run_id}")
            return RedisStore(client, run_id)
        except (exceptions.RedisError, OSError) as error:
            says_no = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)
            if isinstance(error, says_no):
                raise StartError(
                    f"{where} refuses this process ({error}). Its password comes from --redis-password-file or "
                    "REDIS_PASSWORD in the environment, a user's name from REDIS_USERNAME, on each host"
                ) from None
            if time.monotonic() >= deadline:
                raise StartError(
                    f"{where} does not answer after {waited_s:g} s: {error}. Are --redis-host and --redis-port right, "
                    "does it run (`redis-cli -h HOST ping`), does it listen for other hosts (`bind` in redis.conf), "
                    "and is --redis-host rediss://HOST given where it speaks TLS, and only there?"
                ) from None
            time.sleep(0.2)
