"""Ranges of bytes of a file, on this machine or on an HTTP server."""

import http.client
import io
import logging
import os
import re
import threading
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from partial_fc.data.sample import SourceGone
from partial_fc.files import about, regular

_TIMEOUT_S = 30.0
WAITS_S = (
    0.0,
    0.5,
    1.0,
    2.0,
    4.0,
    8.0,
    16.0,
)  # between attempts; the first costs nothing: servers end idle connections
_BUSY = (408, 429, 500, 502, 503, 504)

_log = logging.getLogger(__name__)


def as_url(path: str | os.PathLike[str]) -> str | None:
    """Returns the URL that a path means, of which Path has removed a slash; None for a file of this machine."""
    scheme, colon, rest = str(path).partition(":/")
    return f"{scheme}://{rest.lstrip('/')}" if colon and scheme in ("http", "https") else None


def open_ranges(path: str | os.PathLike[str]) -> "LocalFile | RemoteFile":
    """Opens a file or a URL. Raises OSError or ValueError."""
    url = as_url(path)
    return RemoteFile(url) if url else LocalFile(Path(path))


class LocalFile:
    """A regular file, read by pread. Several threads may read at once."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._descriptor = regular(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, offset: int, count: int) -> bytes:
        with about(self.name):
            return os.pread(self._descriptor, count, offset)

    def will_need(self, offset: int, count: int) -> None:
        os.posix_fadvise(self._descriptor, offset, count, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        os.close(self._descriptor)


class RemoteFile:
    """A file on an HTTP server that answers range requests. Each thread keeps a connection of its own.

    An unreachable or overloaded server is asked again, with growing pauses (WAITS_S); then `read` raises SourceGone.
    Any other answer raises ValueError. Redirects are not followed.
    """

    def __init__(self, url: str) -> None:
        self.name, self.size = url, -1
        parts = urlsplit(url)
        connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connect = partial(connection, parts.netloc, timeout=_TIMEOUT_S)
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._of_thread = threading.local()
        self.read(0, 1)

    def read(self, offset: int, count: int) -> bytes:
        if count == 0:
            return b""
        for wait_s in (*WAITS_S, None):
            try:
                return self._ask(offset, count)
            except (OSError, http.client.HTTPException) as error:
                self._disconnect()
                what = f"{self.name}, offset {offset}: {error or type(error).__name__}"
                if wait_s is None:
                    raise SourceGone(f"{what}; tried {len(WAITS_S) + 1} times in {sum(WAITS_S):g} s") from None
                if wait_s:
                    _log.warning("%s; trying again in %g s", what, wait_s)
                time.sleep(wait_s)
        raise AssertionError

    def _ask(self, offset: int, count: int) -> bytes:
        connection = getattr(self._of_thread, "connection", None) or self._connect()
        self._of_thread.connection = connection
        connection.request("GET", self._target, headers={"Range": f"bytes={offset}-{offset + count - 1}"})
        response = connection.getresponse()
        if response.status in _BUSY:
            raise ConnectionError(f"the server answers {response.status} {response.reason}")
        size = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.getheader("Content-Range", ""))
        if response.status != 206 or size is None:
            self._disconnect()
            hint = "; it ignores range requests" if response.status == 200 else ""
            raise ValueError(f"{self.name}: the server answers {response.status} {response.reason}{hint}")
        content = response.read()
        if self.size not in (-1, int(size[1])):
            raise ValueError(f"{self.name} had {self.size} bytes and has {size[1]} now: it was replaced")
        self.size = int(size[1])
        if len(content) != min(count, self.size - offset):
            raise ConnectionError(f"got {len(content)} of {count} bytes")
        return content

    def _disconnect(self) -> None:
        if connection := getattr(self._of_thread, "connection", None):
            connection.close()
            self._of_thread.connection = None

    def will_need(self, offset: int, count: int) -> None:
        return

    def close(self) -> None:
        self._disconnect()


Ranges = LocalFile | RemoteFile


class Stream(io.RawIOBase):
    """Ranges as a file object that can seek."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges, self._at = ranges, 0

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), max(0, self._ranges.size - self._at))
        content = self._ranges.read(self._at, count) if count else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._ranges.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
