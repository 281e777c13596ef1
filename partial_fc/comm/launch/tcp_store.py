"""torch.distributed's TCPStore: the key-value store of a run, in rank 0 or in torchrun's agent. It answers anybody."""

import queue
import resource
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

_CONNECTIONS_OF_A_RANK = 3  # one of its own, one of its watch, one of NCCL


class NotAStore(Exception):
    """Something listens, but does not answer as a store; the message says how."""


def host(listening: socket.socket, size: int, timeout_s: float) -> "dist.TCPStore":
    """Returns a store that this process serves at that socket, which is the store's from now on, to `size` ranks."""
    import torch.distributed as dist

    _allow_open_files(_CONNECTIONS_OF_A_RANK * size + 256)
    address, port = listening.getsockname()[:2]
    address = "127.0.0.1" if address in ("0.0.0.0", "::") else address
    left, descriptor = timedelta(seconds=timeout_s), listening.detach()
    return dist.TCPStore(address, port, None, True, left, wait_for_workers=False, master_listen_fd=descriptor)


def dial(address: str, port: int, timeout_s: float) -> "dist.TCPStore":
    """Returns a connection to the store there. Raises OSError if nobody listens, NotAStore if the one who listens does
    not answer as a store within timeout_s seconds."""
    import torch.distributed as dist

    socket.create_connection((address, port), timeout_s).close()
    found: queue.SimpleQueue[dist.TCPStore | dist.DistError] = queue.SimpleQueue()

    def connect() -> None:
        try:
            found.put(dist.TCPStore(address, port, None, False, timedelta(seconds=timeout_s)))
        except dist.DistError as error:
            found.put(error)

    # Torch waits without end for the first answer.
    threading.Thread(target=connect, name="store", daemon=True).start()
    answer: dist.TCPStore | dist.DistError | None = None
    with suppress(queue.Empty):
        answer = found.get(timeout=timeout_s)
    if not isinstance(answer, dist.TCPStore):
        raise NotAStore(str(answer).splitlines()[0][:200] if answer else "no answer")
    return answer


def read(store: "dist.Store", key: str) -> str:
    """Returns the key's value at once; "" if it is not set. Raises DistError if the store is gone."""
    return store.get(key).decode(errors="replace") if store.check([key]) else ""


def has_ended(process: int) -> bool:
    """Returns whether a process of this host, by its number, has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"  # proc(5): nobody has asked for its status yet


def _allow_open_files(num: int) -> None:
    """Raises the limit on open files (connections count), by default 1,024 on many systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num:
        most = num if hard == resource.RLIM_INFINITY else min(num, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
