"""What somebody who has just connected may cost: so many at a time, and each so many bytes and seconds, until he has
said who he is."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HELLO_BYTES, HELLO_S = 4096, 2.0
LINE_BYTES = 64 << 20  # of the longest line between those who know each other, the observations of very many ranks


class Porch:
    """Those who have connected and not yet said who they are. Where they are too many, the one who has been there for
    longest goes: whoever belongs here has said so within a moment."""

    def __init__(self, most: int):
        self._most = most
        self._here: dict[asyncio.StreamWriter, None] = {}

    @contextmanager
    def waiting(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """For as long as he has not been let in, which the end of the block says."""
        if len(self._here) >= self._most:
            oldest = next(iter(self._here))
            del self._here[oldest]
            oldest.transport.abort()
        self._here[writer] = None
        try:
            yield
        finally:
            self._here.pop(writer, None)


def end(loop: asyncio.AbstractEventLoop) -> None:
    """Closes a loop that runs no more. What is still under way in it comes to its end first: it would complain on the
    terminal of a loop that is closed."""
    loop.set_exception_handler(_but_for_cancellation)
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


def _but_for_cancellation(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Python 3.11 asks a server's task that was cancelled for its exception, and complains of the answer."""
    if not isinstance(context.get("exception"), asyncio.CancelledError):
        loop.default_exception_handler(context)


async def read_line(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    """The next line; nothing at the end. The reader's own limit (HELLO_BYTES) may be smaller: it says how much waits
    unread. Raises ValueError for a line that is longer than most_bytes."""
    parts: list[bytes] = []
    num_bytes = 0
    while True:
        try:
            parts.append(await reader.readuntil(b"\n"))
            return b"".join(parts)
        except asyncio.IncompleteReadError:
            return b""
        except asyncio.LimitOverrunError as error:
            num_bytes += error.consumed
            if num_bytes > most_bytes:
                raise ValueError(f"a line of more than {most_bytes} bytes") from None
            parts.append(await reader.readexactly(error.consumed))
