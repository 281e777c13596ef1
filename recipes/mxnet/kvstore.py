"""MXNet's key-value stores (KVStore), opened so that a failing job ends.

Behaviour of 1.9.1, and the remedy here:

- Freeing a distributed store waits for all other processes: only a worker that has finished calls `close`.
- `kvstore.create` waits forever for a missing server. Here it has a deadline.
- An unknown name gives a store of one process: the caller of `joined` checks it.
- A distributed store with compression refuses `pushpull`, which Module calls. Here it is a push and a pull.
- Operations queued when Python ends are dropped, and the other workers wait for them: `joined` waits before it returns.
"""

import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from partial_fc import comm, output

from .library import mx

_ADDRESS = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
_COUNTS = ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER")


class Store(mx.kv.KVStore):
    """A store that only `close` frees, and that always compresses when asked to."""

    _apart = False

    def set_gradient_compression(self, compression_params: dict[str, Any]) -> None:
        super().set_gradient_compression(compression_params)
        self._apart = "dist" in self.type

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Pushes and pulls in a distributed store. (On one CPU device the pull also writes into the pushed array, which
        Module's next backward pass overwrites.)"""
        if self._apart:
            self.push(key, value, priority)
            self.pull(key, value if out is None else out, priority)
        else:
            super().pushpull(key, value, out, priority)

    def __del__(self) -> None:
        """Does nothing: see `close`."""

    def close(self) -> None:
        """Frees the store. Distributed, it waits for all workers to do so, and ends servers and scheduler."""
        mx.base.check_call(mx.base._LIB.MXKVStoreFree(self.handle))


@dataclass(frozen=True)
class Job:
    """The workers that train together, and their store."""

    name: str
    """The kind of store."""
    rank: int
    num_workers: int
    store: Store

    @property
    def asynchronous(self) -> bool:
        """Tells whether each push updates the weights at once; otherwise an update waits for a push of every worker."""
        return "_async" in self.name


@contextmanager
def joined(name: str, start_timeout_s: float) -> Iterator[Job]:
    """Joins this worker to its job. name: of a store. Raises ValueError if the process was not started for
    such a store. After an error inside the block the process must end by os._exit: only that informs the others."""
    check_started_for(name)
    job = _with_store(name, start_timeout_s)
    yield job
    mx.nd.waitall()
    job.store.close()


def check_started_for(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError if a store of this name would wait forever, or train each process alone."""
    role = environ.get("DMLC_ROLE")
    if role not in (None, "worker"):
        raise ValueError(f"DMLC_ROLE is {role!r}; expected worker, server or scheduler")
    if name.startswith("dist"):
        missing = [variable for variable in (*_COUNTS, *_ADDRESS) if not environ.get(variable)]
        if role is None or missing:
            raise ValueError(
                f"--kv-store {name} needs a scheduler and servers; not set here: {', '.join(missing) or 'DMLC_ROLE'}. "
                "Start this command with `partial-fc launch -n WORKERS -s SERVERS --launcher local COMMAND`"
            )
        if "_async" in name and environ.get("MXNET_UPDATE_ON_KVSTORE") == "0":
            raise ValueError(
                f"MXNET_UPDATE_ON_KVSTORE=0 with --kv-store {name}, where servers update the weights: unset it"
            )
        return
    if role is not None:
        raise ValueError(
            f"started as one of {environ.get('DMLC_NUM_WORKER', 'several')} workers, but --kv-store {name} has no "
            "servers: the workers would wait forever; give --kv-store dist_sync or dist_async, or start without the "
            "launcher"
        )
    launch = comm.detect(environ)
    if launch.size > 1:
        raise ValueError(
            f"{launch.launcher} started {launch.size} processes, but --kv-store {name} is for one: each would train "
            "for itself; start with `partial-fc launch` and give --kv-store dist_sync"
        )


def _with_store(name: str, start_timeout_s: float) -> Job:
    deadline = threading.Timer(start_timeout_s, _give_up, (start_timeout_s,))
    deadline.daemon = True
    if name.startswith("dist"):
        deadline.start()
    try:
        # The only way to a subclass: create() makes the object, and its type is in the C++ library.
        store = mx.kvstore.create(name)
        store.__class__ = Store
        return Job(name, store.rank, store.num_workers, store)
    finally:
        deadline.cancel()


def _give_up(after_s: float) -> None:
    """Ends the process, whose main thread waits inside the library for the rest of the job."""
    print(f"train.py mnist: {absent(after_s)}", file=sys.stderr, flush=True)
    output.drain()
    os._exit(1)


def absent(after_s: float, environ: Mapping[str, str] = os.environ) -> str:
    """Names the missing processes, as far as a worker can tell."""
    host, port = (environ[name] for name in _ADDRESS)
    num_workers, num_servers = (environ[name] for name in _COUNTS)
    number = f"worker {environ['DMLC_TASK_ID']}" if "DMLC_TASK_ID" in environ else "a worker"
    try:
        with socket.create_connection((host, int(port)), timeout=3):
            who = f"the scheduler at {host}:{port} answers, so one or more of the {num_servers} server(s) and "
            who += f"{num_workers} worker(s) are missing: look for the last lines of each; PS_VERBOSE=1 shows who came"
    except OSError as error:
        who = f"the scheduler at {host}:{port} does not answer ({error.strerror or error}): did it start, and is that "
        who += "address right?"
    return f"{number} on {socket.gethostname()} waited {after_s:g} s (--start-timeout) for the rest of the job: {who}"
