"""Waiting for what other processes do, and no longer than so; a port that nobody listens at."""

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def until(
    happened: Callable[[], object],
    seconds: float = 60.0,
    job: subprocess.Popen | None = None,
    said: Callable[[], str] = lambda: "",
) -> None:
    """Returns once it has happened. AssertionError: not in time, or the job has ended. said: what that has printed."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert job is None or job.poll() is None, f"ended with {job.returncode}: {said()}"
        assert time.monotonic() < deadline, f"not in {seconds} s: {said()}"
        time.sleep(0.01)


@contextmanager
def at_most(seconds: int, error: type[BaseException] = TimeoutError) -> Iterator[None]:
    """Raises the error in what takes longer."""

    def too_late(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def free_port(address: str = "127.0.0.1") -> int:
    with socket.create_server((address, 0)) as trial:
        return trial.getsockname()[1]
