"""One process of a host reads a LevelDB for all the others, over a socket that only this user may open.

`python -m partial_fc.data.databases.leveldb_reader DATABASE SOCKET [PLACE]`, started by one of them, serves until its
standard input ends, as it does when the process that started it ends in whatever way. It writes a line to its standard
output once others may connect, before it opens the database, which may take long.

A question is the number of a record, int64, -1 for how many there are; an answer a byte that says what follows: _ITEM,
the key's length (uint32), key and value; _COUNT, int64; _BAD or _FAILED, the text of an error.
"""

import logging
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import weakref
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from partial_fc.data.databases.leveldb_store import LevelDbStore
from partial_fc.data.sample import BadRecord

_ITEM, _COUNT, _BAD, _FAILED = b"icbf"
_READY = b"listening\n"


class Reader:
    """The process, as long as this object lives. Raises ValueError where it does not start."""

    def __init__(self, path: Path, shadow_place: Path | None = None):
        folder = Path(tempfile.mkdtemp(prefix="partial-fc-"))  # mode 0700; a socket's name must be short
        self.address = str(folder / "socket")
        command = [sys.executable, "-m", "partial_fc.data.databases.leveldb_reader", str(path), self.address]
        process = subprocess.Popen(
            [*command, *([str(shadow_place)] if shadow_place else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.close = weakref.finalize(self, _end, process, folder)
        self.pid = process.pid
        assert process.stdout
        if process.stdout.readline() != _READY:
            raise ValueError(
                f"the process that is to read {path} ended (status {process.wait()}); what it said is above"
            )


def _end(process: subprocess.Popen, folder: Path) -> None:
    assert process.stdin
    process.stdin.close()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class RemoteStore:
    """A LevelDB that another process of this host reads. reader: kept alive with it, where it is this process's. Waits
    until the database is open. Raises ValueError with what the reader says is wrong with it, ConnectionError where it
    has ended."""

    kind = "LevelDB"

    def __init__(self, path: Path, address: str, reader: Reader | None = None):
        self.path = path
        self._address = address
        self._reader = reader
        self._local = threading.local()  # a connection for each thread
        (self._num_records,) = struct.unpack("<q", self._ask(-1, _COUNT))

    def __len__(self) -> int:
        return self._num_records

    def item(self, index: int) -> tuple[bytes, bytes]:
        if not 0 <= index < self._num_records:
            raise IndexError(f"record {index} of {self._num_records}")
        content = self._ask(index, _ITEM)
        end = 4 + int.from_bytes(content[:4], "little")
        return content[4:end], content[end:]

    def close(self) -> None:
        if self._reader:
            self._reader.close()

    def _ask(self, number: int, expected: int) -> bytes:
        try:
            if not hasattr(self._local, "connection"):
                self._local.connection = Client(self._address, "AF_UNIX")
            connection: Connection = self._local.connection
            connection.send_bytes(struct.pack("<q", number))
            answer = connection.recv_bytes()
        except (OSError, EOFError) as error:
            raise ConnectionError(
                f"{self.path}: the process that reads this LevelDB for the host has ended ({error!r}); what it said is "
                "in the output of local rank 0. Was it killed, for want of memory perhaps (`dmesg`)?"
            ) from error
        if answer[0] == expected:
            return answer[1:]
        text = answer[1:].decode("utf-8", "surrogateescape")
        raise BadRecord(text) if answer[0] == _BAD else ValueError(text)


def serve(path: Path, address: str, shadow_place: Path | None) -> None:
    """Until standard input ends."""
    listener = Listener(address, "AF_UNIX", backlog=1024)
    opened: Future[LevelDbStore] = Future()
    threading.Thread(target=_accept, args=(listener, opened), daemon=True).start()
    sys.stdout.buffer.write(_READY)
    sys.stdout.flush()
    threading.Thread(target=_open, args=(path, shadow_place, opened), daemon=True).start()
    sys.stdin.buffer.read()
    # Whoever started this has gone: the others end, too.
    listener.close()
    if opened.done() and not opened.exception():
        opened.result().close()
    shutil.rmtree(Path(address).parent, ignore_errors=True)


def _open(path: Path, shadow_place: Path | None, opened: Future[LevelDbStore]) -> None:
    try:
        opened.set_result(LevelDbStore(path, shadow_place))
    except (ValueError, OSError) as error:
        opened.set_exception(error)


def _accept(listener: Listener, opened: Future[LevelDbStore]) -> None:
    while True:
        try:
            connection = listener.accept()
        except OSError:  # closed
            return
        threading.Thread(target=_answer_all, args=(connection, opened), daemon=True).start()


def _answer_all(connection: Connection, opened: Future[LevelDbStore]) -> None:
    with connection:
        while True:
            try:
                (number,) = struct.unpack("<q", connection.recv_bytes())
                connection.send_bytes(_answer(opened, number))
            except (EOFError, ConnectionError):  # it has ended
                return


def _answer(opened: Future[LevelDbStore], number: int) -> bytes:
    try:
        store = opened.result()
        if number < 0:
            return bytes([_COUNT]) + struct.pack("<q", len(store))
        key, value = store.item(number)
        return b"".join((bytes([_ITEM]), struct.pack("<I", len(key)), key, value))
    except BadRecord as error:
        return bytes([_BAD]) + str(error).encode("utf-8", "surrogateescape")
    except (ValueError, OSError, RuntimeError) as error:
        return bytes([_FAILED]) + str(error).encode("utf-8", "surrogateescape")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    serve(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else None)
