"""The handshake by which ranks that start over torch.distributed get the port of rank 0's store.

Rank 0 answers at the master's address and port. Messages are JSON, a line each. The secret is never sent: both sides
prove that they know it (HMAC-SHA-256, RFC 2104).

    rank 0 -> rank   {"nonce": a}
    rank -> rank 0   {"nonce": b, "proof": of "rank", a, b}
    rank 0 -> rank   {"port": p, "proof": of "rank 0", a, b, p}      or   {"wrong": "secret"}

Without a secret, anyone who speaks this protocol gets the port. Rank 0 stops answering when all ranks have joined.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECRET = "PARTIAL_FC_SECRET"  # set by our launchers that start all ranks, in the ranks' environment
_FEWEST_CHARACTERS = 16


class NotRank0(Exception):
    """The listening process is not rank 0 of this run; the message says why."""


class NoAnswer(OSError):
    """The listening process sends nothing, or an incomplete message."""


class Handshake:
    """The rank 0 side of the handshake, in a thread until `close`."""

    def __init__(self, listening: socket.socket, store_port: int, secret: str, size: int):
        """listening: the socket that ranks connect to; `close` closes it."""
        self._listening = listening
        self._store_port = store_port
        self._secret = secret
        self._limiter = Limiter(size + 16)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="handshake", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._answer, sock=self._listening, limit=PRE_AUTH_BYTES))
        self._loop.run_forever()
        self._listening.close()
        end(self._loop)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours = secrets.token_hex(16)
        try:
            with self._limiter.waiting(writer):
                _write(writer, {"nonce": ours})
                line = await asyncio.wait_for(read_line(reader), PRE_AUTH_S)
                reply = json.loads(line)
                knows = hmac.compare_digest(_proof(self._secret, "rank", ours, reply["nonce"]), reply["proof"].encode())
            if knows:
                proof = _proof(self._secret, "rank 0", ours, reply["nonce"], str(self._store_port)).decode()
                _write(writer, {"port": self._store_port, "proof": proof})
            else:
                _write(writer, {"wrong": "secret"})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # another program, or a rank that has ended
        finally:
            writer.close()


def connect(address: str, port: int, secret: str, timeout_s: float) -> int:
    """Returns the port of rank 0's store. Raises OSError if nothing listens, its subclass NoAnswer if the other side is
    silent, NotRank0 if it is another program."""
    with socket.create_connection((address, port), timeout_s) as connection, connection.makefile("rb") as lines:
        connection.settimeout(min(timeout_s, PRE_AUTH_S))
        theirs, ours = _text(_read(lines), "nonce"), secrets.token_hex(16)
        proof = _proof(secret, "rank", theirs, ours).decode()
        connection.sendall(json.dumps({"nonce": ours, "proof": proof}).encode() + b"\n")
        answer = _read(lines)
    if answer.get("wrong") == "secret":
        raise NotRank0("it knows another secret: give all hosts the same --secret-file, or none of them one")
    store_port = answer.get("port")
    right = _proof(secret, "rank 0", theirs, ours, str(store_port))
    if type(store_port) is not int or not hmac.compare_digest(_text(answer, "proof").encode(), right):
        raise NotRank0("it does not know this run's secret")
    return store_port


def read_secret(path: Path) -> str:
    """Reads the secret from a file that only its owner may read. Raises ValueError for any other file."""
    remedy = f"`(umask 077; head -c 32 /dev/urandom | base64 > {path})` makes one; copy it to every host"
    try:
        status = path.stat()
        text = path.read_bytes().decode("ascii").strip() if stat.S_ISREG(status.st_mode) else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--secret-file {path}: {error}; {remedy}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(f"--secret-file {path}: others than you may read or write it; chown and chmod 600 it")
    if len(text) < _FEWEST_CHARACTERS:
        raise ValueError(
            f"--secret-file {path}: {len(text)} characters; expected {_FEWEST_CHARACTERS} or more. {remedy}"
        )
    return text


def _proof(secret: str, *words: str) -> bytes:
    # JSON, so that the encoding is unambiguous.
    return hmac.digest(secret.encode(), json.dumps(words).encode(), "sha256").hex().encode()


def _write(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


def _read(lines: Any) -> dict[str, Any]:
    """Returns the next message. Raises NoAnswer if none arrives, NotRank0 if it is not of this protocol."""
    try:
        line = lines.readline(PRE_AUTH_BYTES)
    except OSError as error:
        raise NoAnswer(f"no answer ({error})") from None
    if not line:
        raise NoAnswer("it hangs up")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise NotRank0("it says something else")
    return message


def _text(message: dict[str, Any], name: str) -> str:
    text = message.get(name)
    if not isinstance(text, str) or not text.isascii():
        raise NotRank0("it says something else")
    return text


PRE_AUTH_BYTES, PRE_AUTH_S = 4096, 2.0
ANSWER_BYTES = 64 << 20  # of the longest line from rank 0: the states of very many ranks


class Limiter:
    """The connections that have not authenticated yet. If there are too many, the oldest is closed."""

    def __init__(self, most: int):
        self._most = most
        self._waiting: dict[asyncio.StreamWriter, None] = {}

    @contextmanager
    def waiting(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Counts the connection as unauthenticated until the end of the block."""
        if len(self._waiting) >= self._most:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()
        self._waiting[writer] = None
        try:
            yield
        finally:
            self._waiting.pop(writer, None)


def end(loop: asyncio.AbstractEventLoop) -> None:
    """Closes a stopped event loop. Cancels its tasks first, as they would print errors about a closed loop."""
    loop.set_exception_handler(_but_for_cancellation)
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


def _but_for_cancellation(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignores the error that Python 3.11 reports for cancelled server tasks."""
    if not isinstance(context.get("exception"), asyncio.CancelledError):
        loop.default_exception_handler(context)


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Returns the next line; b"" at the end. Raises ValueError for one longer than the reader's limit."""
    line = await reader.readline()
    return line if line.endswith(b"\n") else b""
