"""The store of horovodrun's elastic driver, queried here and forwarded to Horovod's own code in this process.

Requests without a signature by the job's token are refused on both sides: a writer to the driver's store decides which
processes communicate (partial_fc/signature.py).
"""

import http.client
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from partial_fc import signature
from partial_fc.comm.launch.detect import StartError
from partial_fc.signature import TOKEN

ASK = "rank_and_size"  # the scope of requests for a process's rank
REMIND_S = 30.0
ANSWER_S = 10.0  # the scope that the driver answers without waiting for others
_log = logging.getLogger("partial_fc")


class Store(ThreadingHTTPServer):
    """The driver's store, as Horovod's own code in this process sees it.

    Raises StartError if the driver's store does not require signatures.
    """

    daemon_threads = True

    def __init__(self, driver: tuple[str, int]):
        if not os.environ.get(TOKEN):
            raise StartError(
                f"horovodrun gave this process no {TOKEN}: its Horovod is not the one that `make setup` builds, and "
                "its elastic mode executes what anybody in the network sends (CVE-2024-10190). Start the job with this "
                "checkout's .venv/bin/horovodrun; if it says the same, run `make setup` again, on each host"
            )
        super().__init__(("127.0.0.1", 0), _Handler)
        self.driver = driver
        self.assignment = b""  # the rank assigned by the driver, as it wrote it
        threading.Thread(target=self.serve_forever, name="elastic-store", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Store

    def parse_request(self) -> bool:
        """Returns whether to process the request, of any method."""
        if not super().parse_request():
            return False
        if signature.is_right(self):
            return True
        self._answer(403, b"")
        return False

    def do_GET(self) -> None:
        if self.path.startswith(f"/{ASK}/"):
            self._answer(200, self.server.assignment)
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not signature.is_right_body(self, body):
            self._answer(403, b"")
            return
        try:
            status, answer = request(self.server.driver, self.command, self.path, body)
        except (OSError, http.client.HTTPException) as error:
            _log.error(f"horovodrun's store does not answer: {error}")
            status, answer = 502, b""
        self._answer(status, answer)

    do_PUT = do_DELETE = _pass_on

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def request(
    store: tuple[str, int],
    method: str,
    path: str,
    body: bytes | None = None,
    remind: Callable[[float], None] | None = None,
) -> tuple[int, bytes]:
    """Returns status and body of the answer; b"" if the store (address, port) lacks the key. `remind`: no timeout while
    the host is reachable; it is called every REMIND_S seconds with the seconds waited so far."""
    connection = http.client.HTTPConnection(*store, timeout=ANSWER_S)
    try:
        connection.connect()
        if remind:
            connection.sock.settimeout(None)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
                connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.request(method, path, body, signature.headers(method, "http://{}:{}{}".format(*store, path), body))
        arrived, asked = select.poll(), time.monotonic()
        arrived.register(connection.sock, select.POLLIN)
        while remind and not arrived.poll(REMIND_S * 1000):
            remind(time.monotonic() - asked)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
