"""Ranges of bytes of a file, on this machine or on an HTTP server."""

import base64
import http.client
import io
import logging
import netrc
import os
import re
import threading
import time
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from partial_fc.data.sample import SourceGone, SourceRefused
from partial_fc.file_kind import HEAD_BYTES, it_is
from partial_fc.files import about, regular

_TIMEOUT_S = 30.0
# Between attempts; the first costs nothing: servers end idle connections.
WAITS_S: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_BUSY = (408, 429, 500, 502, 503, 504)
_REDIRECTS, _MOST_REDIRECTS = (301, 302, 303, 307, 308), 5
_HINTS = {200: "; it ignores range requests", **dict.fromkeys(_REDIRECTS, f", after {_MOST_REDIRECTS} redirects")}
_TOKENS, _HUB = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), "https://huggingface.co"

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


class _Route:
    """The way to a URL: a connection, to a proxy if the environment names one (http_proxy, https_proxy, no_proxy, as
    urllib reads them), and what a request says besides. The token of HF_TOKEN goes to the hub (and HF_ENDPOINT) only.
    The password of a host is that of ~/.netrc (or $NETRC), looked up by the host's name. So a redirect cannot carry
    either to another one. secret: what is sent, for messages."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.username is not None or not host:
            what = "a password in a URL ends up in logs" if host else "no host"
            raise ValueError(
                f"{parts.scheme}://{host}{parts.path}: {what}; put it into ~/.netrc (machine, login, password)"
            )
        self.url, self.headers = url, {}
        self.target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self.secret = ""
        name = next((name for name in _TOKENS if os.environ.get(name, "").strip()), "")
        if name and _origin(url) in (_origin(_HUB), _origin(os.environ.get("HF_ENDPOINT", ""))):
            self.headers["Authorization"], self.secret = f"Bearer {os.environ[name].strip()}", f"the token of {name}"
        elif login := _login(host):
            self.headers["Authorization"], self.secret = _basic(*login), "the password of ~/.netrc"
        proxy = "" if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme, "")
        via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if via.scheme != "http":
            raise ValueError(f"{parts.scheme}_proxy is {via.scheme}://...; expected http://HOST:PORT")
        secret = (
            {"Proxy-Authorization": _basic(unquote(via.username), unquote(via.password or ""))} if via.username else {}
        )
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        at = (via.hostname or "", via.port or 80) if proxy else (host, parts.port)
        self.connection = kind(*at, timeout=_TIMEOUT_S)
        if proxy and parts.scheme == "https":
            self.connection.set_tunnel(host, parts.port or 443, secret)
        elif proxy:
            self.target = urlunsplit((parts.scheme, parts.netloc, parts.path or "/", parts.query, ""))
            self.headers |= secret


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _basic(name: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def _login(host: str) -> tuple[str, str] | None:
    """Returns the name and password of exactly this host."""
    try:
        found = netrc.netrc(os.environ.get("NETRC")).hosts.get(host)
    except FileNotFoundError:
        return None
    except netrc.NetrcParseError as error:
        raise ValueError(f"{error.filename}: {error.msg}") from None
    return (found[0] or "", found[2] or "") if found else None


def redirected(url: str, location: str) -> str:
    """Returns where an answer from `url` leads. Raises ValueError if that is not HTTP, or not encrypted any more."""
    target = urljoin(url, location)
    schemes = [urlsplit(one).scheme for one in (url, target)]
    if schemes[1] not in ("http", "https") or schemes == ["https", "http"]:
        raise ValueError(f"redirected from {schemes[0]} to {schemes[1]}, which is not followed")
    return target


class RemoteFile:
    """A file on an HTTP server that answers range requests. Each thread keeps a connection of its own, to where the
    server redirects; what is redirected is asked for anew when it is refused there (signed URLs expire).

    An unreachable or overloaded server is asked again, with growing pauses (WAITS_S); then `read` raises SourceGone.
    Any other answer raises SourceRefused.
    """

    def __init__(self, url: str) -> None:
        self.name, self.size = url, -1
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
            except ValueError as error:
                self._disconnect()
                raise SourceRefused(str(error)) from None
        raise AssertionError

    def _ask(self, offset: int, count: int) -> bytes:
        range_ = f"bytes={offset}-{offset + count - 1}"
        route = getattr(self._of_thread, "route", None) or _Route(self.name)
        response = self._get(route, range_)
        if route.url != self.name and response.status not in (206, *_BUSY):
            route = _Route(self.name)
            response = self._get(route, range_)
        num_redirects = 0
        while response.status in _REDIRECTS and num_redirects < _MOST_REDIRECTS:
            try:
                route = _Route(redirected(route.url, response.getheader("Location", "")))
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None
            response = self._get(route, range_)
            num_redirects += 1
        if response.status in _BUSY:
            raise ConnectionError(f"the server answers {response.status} {response.reason}")
        given = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.getheader("Content-Range", ""))
        if response.status != 206 or given is None or int(given[1]) != offset:
            hint = f"; it sends bytes from {given[1]}, not {offset}" if given else _HINTS.get(response.status, "")
            if response.status == 200:
                hint += it_is(response.read(HEAD_BYTES)).replace("it is", "what it sends is")
            if response.status in (401, 403):
                hint = f"; {route.secret or 'no password'} was sent. ~/.netrc can have one; HF_TOKEN is for {_HUB} and "
                hint += "HF_ENDPOINT"
            raise ValueError(f"{self.name}: the server answers {response.status} {response.reason}{hint}")
        content = response.read()
        if self.size not in (-1, int(given[2])):
            raise ValueError(f"{self.name} had {self.size} bytes and has {given[2]} now: it was replaced")
        self.size = int(given[2])
        if len(content) != min(count, self.size - offset):
            raise ConnectionError(f"got {len(content)} of {count} bytes")
        return content

    def _get(self, route: _Route, range_: str) -> http.client.HTTPResponse:
        if getattr(self._of_thread, "route", None) is not route:
            self._disconnect()
            self._of_thread.route = route
        route.connection.request("GET", route.target, headers={"Range": range_, **route.headers})
        return route.connection.getresponse()

    def _disconnect(self) -> None:
        if route := getattr(self._of_thread, "route", None):
            route.connection.close()
            self._of_thread.route = None

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
