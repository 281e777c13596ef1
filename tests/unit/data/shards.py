"""Tar shards, Parquet files and a server for them, for tests."""

import io
import tarfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest


def write_members(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_tar(path: Path, samples: Iterable[tuple[str, bytes, str]]) -> Path:
    """Writes (name, image, label as .cls has it) as webdataset does."""
    members = []
    for name, image, label in samples:
        members += [(f"{name}.jpg", image), (f"{name}.{'json' if label.startswith('{') else 'cls'}", label.encode())]
    return write_members(path, members)


def write_parquet(path: Path, columns: dict[str, Any], metadata: dict[str, str] | None = None, **more: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table(columns).replace_schema_metadata(metadata)
    pytest.importorskip("pyarrow.parquet").write_table(table, path, **more)
    return path


class RangeServer(BaseHTTPRequestHandler):
    """Serves ranges of the files in `folder`. answers: statuses to answer with first. left: after so many answers it is
    overloaded for ever; none: never. moved: the start of the URL that it redirects to, if any. seen: (request line,
    headers) of every request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer takes 40 ms
    folder: ClassVar[Path]
    answers: ClassVar[list[int]]
    left: ClassVar[list[int]]
    moved: ClassVar[str]
    seen: ClassVar[list[tuple[str, dict[str, str]]]]

    def do_CONNECT(self) -> None:
        self.seen.append((self.requestline, dict(self.headers)))
        self._answer(403)

    def do_GET(self) -> None:
        self.seen.append((self.requestline, dict(self.headers)))
        path = self.folder / urlsplit(self.path).path.lstrip("/")  # to a proxy, the whole URL
        self.left[:] = [left - 1 for left in self.left]
        if self.left and self.left[0] < 0:
            self._answer(503)
        elif self.answers:
            self._answer(self.answers.pop(0))
        elif self.moved:
            self._answer(302, b"moved", {"Location": f"{self.moved}{self.path}?signature=1"})
        elif not path.exists():
            self._answer(404)
        else:
            content = path.read_bytes()
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            part = content[int(first) : int(last) + 1]
            ends = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            self._answer(206, part, {"Content-Range": ends})

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] = {}) -> None:  # noqa: B006
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def serving(
    folder: Path, answers: list[int] | None = None, kind: type[RangeServer] = RangeServer, **more: Any
) -> Iterator[str]:
    """Yields the URL of a folder. more: as RangeServer says, and attributes of another kind."""
    given = {"answers": answers if answers is not None else [], "left": [], "moved": "", "seen": [], **more}
    handler = type("Handler", (kind,), {"folder": folder, **given})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
