"""Limits on connections before they have authenticated: their number, bytes and seconds."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
