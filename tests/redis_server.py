"""A real Redis server for tests, on a port of its own, that keeps nothing on disk."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def free_port(address: str = "127.0.0.1") -> int:
    with socket.create_server((address, 0)) as trial:
        return trial.getsockname()[1]


def skip_without() -> None:
    pytest.importorskip("redis", reason="the package redis is not installed: pip install redis")
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server here; `make setup` installs Debian's package redis-server")


def command(port: int, *options: str) -> list[str]:
    return ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--loglevel", "warning", *options]


@contextmanager
def redis_server(*options: str) -> Iterator[int]:
    """Its port, once it listens there; options: of redis-server. Skips where there is none."""
    skip_without()
    port = free_port()
    with subprocess.Popen(command(port, "--bind", "127.0.0.1", *options), stdout=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 20
            while server.poll() is None:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            assert server.poll() is None, "redis-server has ended"
            yield port
        finally:
            server.kill()
