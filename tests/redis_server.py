"""A real Redis server for tests, on a port of its own, that keeps nothing on disk."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.waiting import free_port, until


def skip_without() -> None:
    pytest.importorskip("redis", reason="the package redis is not installed: pip install redis")
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server here; `make setup-all` installs Debian's package redis-server")


def command(port: int, *options: str) -> list[str]:
    return ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--loglevel", "warning", *options]


def listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def redis_server(*options: str) -> Iterator[int]:
    """Its port, once it listens there; options: of redis-server. Skips where there is none."""
    skip_without()
    port = free_port()
    with subprocess.Popen(command(port, "--bind", "127.0.0.1", *options), stdout=subprocess.DEVNULL) as server:
        try:
            until(lambda: listens(port), job=server)
            yield port
        finally:
            server.kill()
