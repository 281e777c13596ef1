"""Ranges of bytes of a file, on this machine, or by fsspec on an HTTP server or in an object store."""

import io
import logging
import netrc
import os
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from partial_fc.data.sample import SourceGone, SourceRefused
from partial_fc.errors import install
from partial_fc.file_kind import HEAD_BYTES, it_is
from partial_fc.files import about, regular

# Between attempts; the first costs nothing: servers end idle connections.
WAITS_S: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_TIMEOUT_S = 30.0
_BUSY = (408, 429, 500, 502, 503, 504)
_TOKENS, _HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), "https://huggingface.co"
_NEEDS = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub"}

_log = logging.getLogger(__name__)


def as_url(path: str | os.PathLike[str]) -> str | None:
    """Returns the URL that a path means, of which Path has removed a slash; None for a file of this machine."""
    scheme, colon, rest = str(path).partition(":/")
    return f"{scheme}://{rest.lstrip('/')}" if colon and scheme in _NEEDS else None


def open_ranges(path: str | os.PathLike[str]) -> "LocalFile | RemoteFile":
    """Opens a file or a URL: a file object that several threads may `pread`. Raises OSError or ValueError."""
    url = as_url(path)
    return RemoteFile(url) if url else LocalFile(Path(path))


class LocalFile(io.FileIO):
    """A regular file."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), opener=regular)
        self.size = os.fstat(self.fileno()).st_size

    def pread(self, offset: int, count: int) -> bytes:
        with about(self.name):
            return os.pread(self.fileno(), count, offset)

    def will_need(self, offset: int, count: int) -> None:
        os.posix_fadvise(self.fileno(), offset, count, os.POSIX_FADV_WILLNEED)


class RemoteFile(io.RawIOBase):
    """A file that fsspec reads. An unreachable or overloaded server is asked again, with growing pauses (WAITS_S); then
    `pread` raises SourceGone. Any other answer than the range raises SourceRefused.

    HTTP: where a URL leads to is asked directly from then on; the URL anew when refused there (signed URLs expire).
    aiohttp takes proxies from the environment, and passwords, for each host its own, from ~/.netrc or $NETRC.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.username is not None:
            url = f"{parts.scheme}://{parts.hostname}{parts.path}"
            raise ValueError(f"{url}: a password in a URL ends up in logs; put it into ~/.netrc")
        self.name, self.size, self._at, self._next = url, -1, url, 0
        self._is_http = parts.scheme.startswith("http")
        options: dict[str, Any] = {}
        try:
            import fsspec

            if self._is_http:
                from aiohttp import ClientTimeout

                timeout = ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=_TIMEOUT_S)
                client = {"trust_env": True, "middlewares": (self._ask,), "timeout": timeout}
                options = {"client_kwargs": client, "headers": {"Accept-Encoding": "identity"}}
            self._files: Any = fsspec.filesystem(parts.scheme, skip_instance_cache=True, **options)
        except ImportError as error:
            command = install("remote") if self._is_http else f"pip install fsspec {_NEEDS[parts.scheme]}"
            raise ValueError(f"{url}: {error}: `{command}`") from None
        self.pread(0, 1)

    def pread(self, offset: int, count: int) -> bytes:
        how = {} if self._files.async_impl else {"cache_type": "none"}
        for wait_s in (*WAITS_S, None):
            url = self._at
            try:
                if self.size < 0 and not self._is_http:
                    self.size = self._files.info(url)["size"]
                content = self._files.cat_file(url, offset, offset + count, **how)
                if len(content) != min(count, self.size - offset):
                    raise ConnectionError(f"got {len(content)} of {count} bytes")
                return content
            except Exception as error:  # each of fsspec's packages has errors of its own
                what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
                is_answer = isinstance(error, ValueError | FileNotFoundError | PermissionError)
                if is_answer or getattr(error, "status", _BUSY[0]) not in _BUSY:
                    if url != self.name and wait_s is not None:
                        self._at = self.name
                        continue
                    raise SourceRefused(f"{self.name}: {what}") from None
                what = f"{self.name}, offset {offset}: {what}"
                if wait_s is None:
                    raise SourceGone(f"{what}; tried {len(WAITS_S) + 1} times in {sum(WAITS_S):g} s") from None
                if wait_s:
                    _log.warning("%s; trying again in %g s", what, wait_s)
                time.sleep(wait_s)
        raise AssertionError

    async def _ask(self, request: Any, send: Any) -> Any:
        """A middleware of aiohttp: for each request, also of a redirect, adds the hub's token and checks the answer."""
        url = str(request.url)
        if token := hub_token(url):
            request.headers["Authorization"] = f"Bearer {token}"
        elif "Authorization" in request.headers and request.url.host not in netrc.netrc(os.environ.get("NETRC")).hosts:
            del request.headers["Authorization"]  # of a line `default`: signed URLs are refused with it
        response = await send(request)
        try:
            if 300 <= response.status < 400:
                check_redirect(url, response.headers.get("Location", ""))
            else:
                await self._check(response, request.headers["Range"])
                self._at = url
        except BaseException:
            response.close()
            raise
        return response

    async def _check(self, response: Any, asked: str) -> None:
        says = f"the server answers {response.status} {response.reason}"
        if response.status in _BUSY:
            raise ConnectionError(says)
        if response.status == 200:
            kind = it_is(await response.content.read(HEAD_BYTES)).replace("it is", "what it sends is")
            raise ValueError(f"{says}; it ignores range requests{kind}")
        given = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        if response.status != 206 or given is None:
            sent = "a password" if "Authorization" in response.request_info.headers else "no password"
            hint = f"; {sent} was sent. ~/.netrc can have one; HF_TOKEN is for {_HUB} and HF_ENDPOINT"
            raise ValueError(says + hint * (response.status in (401, 403)))
        if given[1] != (first := asked.removeprefix("bytes=").partition("-")[0]):
            raise ValueError(f"{says}; it sends bytes from {given[1]}, not {first}")
        if self.size not in (-1, int(given[2])):
            raise ValueError(f"it had {self.size} bytes and has {given[2]} now: it was replaced")
        self.size = int(given[2])

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), max(0, self.size - self._next))
        buffer[:count] = self.pread(self._next, count) if count else b""
        self._next += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._next = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._next, os.SEEK_END: self.size}[whence]
        return self._next

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._files = None  # ends its connections
        super().close()


def hub_token(url: str) -> str:
    """Returns the token for the host of a URL: that of HF_TOKEN for the hub, and the server that HF_ENDPOINT names."""
    parts = urlsplit(url)
    if f"{parts.scheme}://{parts.netloc}" not in (_HUB, os.environ.get("HF_ENDPOINT", "").rstrip("/")):
        return ""
    return next(filter(None, (os.environ.get(name, "").strip() for name in _TOKENS)), "")


def check_redirect(url: str, location: str) -> None:
    """Raises ValueError if an answer from `url` leads to what is not HTTP, or not encrypted any more."""
    schemes = [urlsplit(one).scheme for one in (url, urljoin(url, location))]
    if schemes[1] not in ("http", "https") or schemes == ["https", "http"]:
        raise ValueError(f"redirected from {schemes[0]} to {schemes[1]}, which is not followed")


Ranges = LocalFile | RemoteFile
