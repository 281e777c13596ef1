"""Signatures of requests to the store of horovodrun: HMAC-SHA-256 (RFC 2104) with the token of the job, which is never
sent. An eavesdropper can neither forge nor replay requests.

    Horovod-Store-Signature: SENDER NUMBER DIGEST MAC

SENDER is a random name of the sending process, NUMBER counts its requests, DIGEST is the SHA-256 of the body, and MAC
is that of "SENDER NUMBER DIGEST METHOD URL". A server checks MAC before it reads the body, and takes each number of a
sender once. It keeps the last ones only, as IPsec does (RFC 4303, 3.4.3): a request overtaken by WINDOW others is
refused.

patches/horovod/signed-store.patch has Horovod's Python call this module, and its C++ write the same header.
"""

import hashlib
import hmac
import itertools
import os
import secrets
import threading
from http.server import BaseHTTPRequestHandler

TOKEN = "_HOROVOD_STORE_TOKEN"  # the environment variable; Horovod puts it on no command line
HEADER = "Horovod-Store-Signature"
WINDOW = 1024
_sender = secrets.token_hex(16)
_numbers = itertools.count(1)
_received: dict[str, set[int]] = {}  # sender -> numbers of its last requests
_receiving = threading.Lock()


def make_token() -> None:
    """Sets the token if the environment has none: 256 bits as hexadecimal digits."""
    if not os.environ.get(TOKEN):
        os.environ[TOKEN] = secrets.token_hex(32)


def headers(method: str, url: str, body: bytes | None) -> dict[str, str]:
    """Returns the header that signs a request. url: http://ADDRESS:PORT/PATH."""
    # Forked processes get a name of their own, and count their own requests.
    signed = f"{_sender}{os.getpid():x} {next(_numbers)} {hashlib.sha256(body or b'').hexdigest()}"
    return {HEADER: f"{signed} {_mac(signed, method, url)}"}


def is_right(request: BaseHTTPRequestHandler) -> bool:
    """Returns whether a request, its headers read, is signed, sent to this server, and not replayed."""
    signed, _, mac = request.headers.get(HEADER, "").rpartition(" ")
    address, port = request.connection.getsockname()[:2]
    expected = _mac(signed, request.command, f"http://{address}:{port}{request.path}")
    if not hmac.compare_digest(mac.encode(), expected.encode()):
        return False
    sender, number, _ = signed.split(" ")
    with _receiving:
        return _is_new(_received.setdefault(sender, set()), int(number))


def is_right_body(request: BaseHTTPRequestHandler, body: bytes) -> bool:
    """Returns whether this is the body of a request whose header `is_right`."""
    digest = request.headers[HEADER].split(" ")[2]
    return hmac.compare_digest(hashlib.sha256(body).hexdigest(), digest)


def derived_key(purpose: str) -> bytes:
    """Returns 32 bytes derived from the token, so that keys need not be sent."""
    return hmac.digest(os.environ[TOKEN].encode(), purpose.encode(), "sha256")


def _is_new(received: set[int], number: int) -> bool:
    newest = max(received, default=0)
    if number in received or number <= newest - WINDOW:
        return False
    received.add(number)
    if len(received) > 2 * WINDOW:
        received.difference_update([old for old in received if old <= newest - WINDOW])
    return True


def _mac(signed: str, method: str, url: str) -> str:
    message = f"{signed} {method} {url}".encode("utf-8", "surrogateescape")
    return hmac.digest(os.environ[TOKEN].encode(), message, "sha256").hex()
