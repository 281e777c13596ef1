"""Stores for the rendezvous of hosts without a launcher: a key of a Redis server, or a folder that all hosts see.

Both hold few keys and short values, with the methods of torch.distributed's stores. Nothing is unpickled.
"""

import os
import secrets
import shlex
import stat
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from partial_fc.comm.launch.detect import StartError

if TYPE_CHECKING:
    import redis

EXPIRE_S = 60  # from the last refresh, if the processes ended without removing it, to the key's end
_ANSWER_S = 5.0  # of the server
_CONNECT_S = 10.0  # the server runs before the processes do, so a wrong name fails early
_MOST_BYTES = 1 << 16


class Store:
    """A store; its methods raise `errors` if the server or the disk fails."""

    name: str
    """Its kind and place, for messages."""
    leftover: str
    """The removal of a killed run's keys, for messages."""
    errors: tuple[type[Exception], ...] = (OSError,)

    def set(self, key: str, value: str | bytes) -> None:
        raise NotImplementedError

    def read(self, key: str) -> bytes | None:
        """Returns the value; None if the key is not set."""
        raise NotImplementedError

    def compare_set(self, key: str, expected: str, desired: str | bytes) -> bytes:
        """Sets the key if it is not set (`expected` must be ""). Returns its value then."""
        raise NotImplementedError

    def delete_key(self, key: str) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def check(self, keys: Sequence[str]) -> bool:
        return all(self.read(key) is not None for key in keys)


class RedisStore(Store):
    """A hash of a Redis server under the key partial-fc:RUN_ID: the keys of the store are its fields.

    It expires; a thread renews it until `close`.
    """

    def __init__(self, client: "redis.Redis", run_id: str, expire_s: int = EXPIRE_S):
        from redis import RedisError

        self.errors = (RedisError, OSError)
        self._client = client
        self._expire_s = expire_s
        self.key = f"partial-fc:{run_id}"
        at = client.connection_pool.connection_kwargs
        self.name = f"Redis at {at['host']}:{at['port']}, key {self.key}"
        delete = f"redis-cli -h {at['host']} -p {at['port']} DEL {shlex.quote(self.key)}"
        self.leftover = f"the key goes by itself {expire_s} s after the last process that uses it, or by `{delete}`"
        self._closed = threading.Event()
        threading.Thread(target=self._refresh, name="redis-expire", daemon=True).start()

    def set(self, key: str, value: str | bytes) -> None:
        with self._client.pipeline(transaction=True) as steps:
            steps.hset(self.key, key, value)
            steps.expire(self.key, self._expire_s)
            steps.execute()

    def read(self, key: str) -> bytes | None:
        value: bytes | None = self._client.hget(self.key, key)  # type: ignore[assignment]
        return value

    def compare_set(self, key: str, expected: str, desired: str | bytes) -> bytes:
        with self._client.pipeline(transaction=True) as steps:
            steps.hsetnx(self.key, key, desired)
            steps.expire(self.key, self._expire_s)
            steps.hget(self.key, key)
            return steps.execute()[2]

    def delete_key(self, key: str) -> bool:
        """Deletes the key; the hash goes with its last field."""
        return bool(self._client.hdel(self.key, key))

    def close(self) -> None:
        self._closed.set()
        self._client.close()

    def _refresh(self) -> None:
        """Renews the key. If the server fails now, the run does not need it any more: the key may only expire."""
        answered = True
        while not self._closed.wait(self._expire_s / 4):
            try:
                self._client.expire(self.key, self._expire_s)
                answered = True
            except self.errors as error:
                if answered and not self._closed.is_set():
                    print(f"note: {self.name} cannot be refreshed: {error}", file=sys.stderr, flush=True)
                answered = False


class FolderStore(Store):
    """A folder partial-fc-RUN_ID in a shared folder, with a file for each key; only its owner may enter.

    Raises StartError if the folder belongs to another user.
    """

    def __init__(self, shared: Path, run_id: str):
        self._prefix = f".{secrets.token_hex(8)}-"
        self.folder = shared / f"partial-fc-{quote(run_id, safe='')}"
        self.name = f"folder {self.folder}"
        self.leftover = f"remove it on one host: `rm -r {shlex.quote(str(self.folder.absolute()))}`"
        self._create()

    def set(self, key: str, value: str | bytes) -> None:
        os.replace(self._written(value), self.folder / quote(key, safe=""))

    def read(self, key: str) -> bytes | None:
        # Listing makes NFS look at the folder itself; otherwise it caches a missing name for up to a minute.
        try:
            if quote(key, safe="") not in os.listdir(self.folder):
                return None
            descriptor = os.open(self.folder / quote(key, safe=""), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            return file.read(_MOST_BYTES)

    def compare_set(self, key: str, expected: str, desired: str | bytes) -> bytes:
        written = self._written(desired)
        try:
            while True:
                with suppress(FileExistsError):  # only one process can create a link, over NFS too
                    os.link(written, self.folder / quote(key, safe=""))
                found = self.read(key)
                if found is not None:  # else it was removed meanwhile
                    return found
        finally:
            written.unlink(missing_ok=True)

    def delete_key(self, key: str) -> bool:
        """Deletes the key; the folder goes with its last file."""
        try:
            (self.folder / quote(key, safe="")).unlink()
        except FileNotFoundError:
            return False
        finally:
            with suppress(OSError):  # not empty, or gone
                self.folder.rmdir()
        return True

    def close(self) -> None:
        for path in self.folder.glob(f"{self._prefix}*"):  # Ctrl-C may have come during a write
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def _create(self) -> None:
        written = self._written("")
        owner = os.lstat(written).st_uid  # of our files, by the clock of the folder's server
        written.unlink()
        found = os.lstat(self.folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or found.st_mode & 0o022:
            raise StartError(
                f"{self.name} is not a folder of this user (number {owner}) alone: others could write into it. Is it "
                "another user's? Take another --run-id or another --file-store-path"
            )

    def _written(self, value: str | bytes) -> Path:
        """Returns a new file with that value, under a name that no key has."""
        self.folder.mkdir(mode=0o700, exist_ok=True)  # a run that has just ended may have removed it
        path = self.folder / f"{self._prefix}{secrets.token_hex(8)}"
        try:
            with open(path, "xb") as file:
                file.write(value.encode() if isinstance(value, str) else value)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return path


def open_redis(host: str, port: int, run_id: str, timeout_s: float, **options: Any) -> RedisStore:
    """Returns the run's store, once the server answers; else raises StartError. options: of redis.Redis."""
    from redis import Redis, exceptions
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    where = f"Redis at {host}:{port}"
    # Servers older than 6 know no other protocol. The second try is for an idle connection that was closed.
    limits: dict[str, Any] = {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _ANSWER_S}
    client = Redis(host, port, protocol=2, retry=Retry(NoBackoff(), 1), **limits, **options)
    waited_s = min(timeout_s, _CONNECT_S)
    deadline = time.monotonic() + waited_s
    while True:
        try:
            client.exists(f"partial-fc:{run_id}")
            return RedisStore(client, run_id)
        except (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError) as error:
            raise StartError(
                f"{where} refuses this process ({error}). Its password comes from --redis-password-file or "
                "REDIS_PASSWORD in the environment, a user's name from REDIS_USERNAME, on each host"
            ) from None
        except (
            exceptions.ConnectionError,
            exceptions.TimeoutError,
            OSError,
        ) as error:  # BusyLoadingError, too: a server that starts
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            raise StartError(
                f"{where} does not answer after {waited_s:g} s: {error}. Are --redis-host and --redis-port right, does "
                "it run (`redis-cli -h HOST ping`), does it listen for other hosts (`bind` in redis.conf), and is "
                "--redis-tls given where it speaks TLS, and only there?"
            ) from None
        except exceptions.RedisError as error:
            raise StartError(f"{where} does not serve this process: {error}") from None


def open_folder(shared: Path, run_id: str) -> FolderStore:
    """Returns the store of a run. Raises StartError if the folder cannot be used."""
    try:
        return FolderStore(shared, run_id)
    except StartError:
        raise
    except OSError as error:
        raise StartError(
            f"--file-store-path {shared}: {error.strerror} ({error.filename}). It must be a folder that this user may "
            "write to, the same one on all hosts (`ls -ld`, `mount` and `df` show it)"
        ) from None
