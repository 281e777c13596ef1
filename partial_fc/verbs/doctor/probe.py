"""The probe of `partial-fc doctor env`, run on each host (hosts.py): reports facts, measures speed.

    python -m partial_fc.verbs.doctor.probe facts|serve|connect <<<'{"name of the argument": its value, ...}'

Arguments come from standard input, which no other user can read; the answer is a line of JSON after MARK.
"""

import hashlib
import json
import math
import os
import platform
import queue
import resource
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata, util
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import psutil

from partial_fc.comm.launch import addresses
from partial_fc.memory import available_memory_bytes

# Precedes the answer: login scripts may print before it.
MARK = "partial-fc doctor: "

_PACKAGES = ("torch", "numpy", "horovod", "mxnet", "opencv-python-headless", "safetensors")
_PINGS = 50
_TOKEN_BYTES, _ACCEPTING, _ORDER_BYTES = 16, 16, 64
_BLOCK = bytes(1 << 18)
_FIRST_BLOCKS, _MOST_BLOCKS, _ENOUGH_S = 4, 4096, 0.3  # 1 MiB to 1 GiB
_TIME = struct.Struct("!d")


def facts(checkout: str, models_root: str, peers: list[str]) -> dict[str, Any]:
    """Returns this host's facts for a run. peers: names of the others, as given to the launchers."""
    interfaces = _interfaces()
    return {
        "name": socket.gethostname(),
        "time": time.time(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "checkout": _digest(Path(checkout)),
        "horovod": _horovod(),
        "torch": _torch(),
        "gpus": _output(["nvidia-smi", "--list-gpus"]).splitlines(),
        "mpirun": _output(["mpirun", "--version"]).partition("\n")[0],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": available_memory_bytes(),
        "shm_bytes": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        "disk": _disk(Path(models_root)),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "interfaces": interfaces,
        "own_address": _address(socket.gethostname()),
        "routes": {peer: _route(peer, interfaces) for peer in peers},
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("HOROVOD_", "NCCL_", "GLOO_", "OMPI_MCA_")) or name == "CUDA_VISIBLE_DEVICES"
        },
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _digest(checkout: Path) -> str:
    """Returns a checksum of a run's sources; "" without them."""
    files = [checkout / "train.py", checkout / "config.sh"]
    files += [path for folder in ("partial_fc", "recipes") for path in (checkout / folder).rglob("*.py")]
    sources = sorted((str(path.relative_to(checkout)), path) for path in files if path.is_file())
    digest = hashlib.sha256()
    for name, path in sources:
        digest.update(f"{name}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12] if sources else ""


def _horovod() -> dict[str, Any]:
    """Returns Horovod's build options. `frameworks`: by its files, since loading one takes seconds."""
    spec = util.find_spec("horovod")
    if spec is None or not spec.origin:
        return {"error": "not installed"}
    folder = Path(spec.origin).parent
    frameworks = [name for name in ("torch", "mxnet") if any((folder / name).glob("mpi_lib*.so"))]
    try:
        import horovod.torch as hvd
    except Exception as error:  # a missing library, another version ...: any message is the finding
        return {"error": f"{type(error).__name__}: {error}", "frameworks": frameworks}
    built = {"gloo": hvd.gloo_built(), "mpi": hvd.mpi_built(), "nccl": hvd.nccl_built()}
    return {"frameworks": frameworks, "built": [name for name, is_built in built.items() if is_built]}


def _torch() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    usable = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda or "",
        "gpus": torch.cuda.device_count() if usable else 0,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if usable else "",
    }


def _output(command: list[str]) -> str:
    """Returns a command's output; "" if it is missing or fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _disk(path: Path) -> dict[str, Any]:
    """Returns the disk of the folder, or of its nearest existing parent."""
    folder = next(p for p in (path, *path.absolute().parents) if p.exists())
    return {
        "path": str(folder),
        "free_bytes": shutil.disk_usage(folder).free,
        "writable": os.access(folder, os.W_OK | os.X_OK),
    }


def _interfaces() -> dict[str, dict[str, Any]]:
    """Returns the interfaces that are up and have an IPv4 address. mbps: the link's stated speed, or 0."""
    address = addresses.by_interface()
    return {
        name: {"address": address[name], "mbps": link.speed}
        for name, link in psutil.net_if_stats().items()
        if link.isup and address.get(name)
    }


def _address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _route(peer: str, interfaces: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns the interface of packets to that host; sends nothing."""
    address = _address(peer)
    if not address:
        return {"error": f"cannot resolve {peer}"}
    try:
        source = addresses.towards(address)
    except OSError as error:
        return {"address": address, "error": error.strerror or str(error)}
    names = [name for name, interface in interfaces.items() if interface["address"] == source]
    return {"address": address, "source": source, "interface": names[0] if names else ""}


# ---- speed between two hosts: a ping, or blocks one way


def serve(seconds: float, address: str) -> None:
    """Answers one `connect` that has the token; always ends after this many seconds. address: the one of this host to
    listen on; if it is not its own (address translation), all."""
    signal.alarm(math.ceil(seconds))
    token = secrets.token_bytes(_TOKEN_BYTES)
    try:
        listener = Listener((address, 0), authkey=token)
    except OSError:
        listener = Listener(("", 0), authkey=token)
    _print({"port": listener.address[1], "token": token.hex()})
    accepted: queue.Queue[Connection] = queue.Queue()
    for _ in range(_ACCEPTING):
        threading.Thread(target=_accept, args=(listener, accepted), daemon=True).start()
    _answer(accepted.get())


def _accept(listener: Listener, accepted: "queue.Queue[Connection]") -> None:
    """Accepts connections until one has the token. Several threads do: a silent connection blocks only its own."""
    while True:
        with suppress(AuthenticationError, EOFError, OSError):
            accepted.put(listener.accept())
            return


def _answer(connection: Connection) -> None:
    with connection, suppress(EOFError):
        while True:
            order, _, count = connection.recv_bytes(_ORDER_BYTES).partition(b" ")
            num_blocks = min(int(count or b"0"), _MOST_BLOCKS)
            if order == b"ping":
                connection.send_bytes(_TIME.pack(time.time()))
            elif order == b"up":
                _receive(connection, num_blocks)
                connection.send_bytes(b"done")
            else:
                _send(connection, num_blocks)


def connect(address: str, port: int, token: str) -> dict[str, float]:
    """Returns latency_ms (round trip), clock_s (that host's clock minus ours), up and down (Gbit/s)."""
    socket.create_connection((address, port), timeout=5).close()  # Client has no time limit
    with Client((address, port), authkey=bytes.fromhex(token)) as connection:
        pings = []
        for _ in range(_PINGS):
            started, before = time.perf_counter(), time.time()
            connection.send_bytes(b"ping")
            (theirs,) = _TIME.unpack(connection.recv_bytes())
            seconds = time.perf_counter() - started
            pings.append((seconds, theirs - (before + seconds / 2)))
        latency, clock = min(pings)

        def up(num_blocks: int) -> None:
            connection.send_bytes(b"up %d" % num_blocks)
            _send(connection, num_blocks)
            connection.recv_bytes()

        def down(num_blocks: int) -> None:
            connection.send_bytes(b"down %d" % num_blocks)
            _receive(connection, num_blocks)

        return {"latency_ms": 1e3 * latency, "clock_s": clock, "up": _gbps(up), "down": _gbps(down)}


def _gbps(transfer: Callable[[int], None]) -> float:
    """Measures Gbit/s, doubling the blocks until it takes long enough."""
    num_blocks = _FIRST_BLOCKS
    while True:
        started = time.perf_counter()
        transfer(num_blocks)
        seconds = time.perf_counter() - started
        if seconds > _ENOUGH_S or num_blocks >= _MOST_BLOCKS:
            return 8e-9 * num_blocks * len(_BLOCK) / seconds
        num_blocks *= 2


def _send(connection: Connection, num_blocks: int) -> None:
    for _ in range(num_blocks):
        connection.send_bytes(_BLOCK)


def _receive(connection: Connection, num_blocks: int) -> None:
    for _ in range(num_blocks):
        connection.recv_bytes(len(_BLOCK))


def _print(values: dict[str, Any]) -> None:
    print(MARK + json.dumps(values), flush=True)


if __name__ == "__main__":
    arguments = json.load(sys.stdin)
    if sys.argv[1] == "serve":
        serve(**arguments)
    else:
        _print(facts(**arguments) if sys.argv[1] == "facts" else connect(**arguments))
    sys.stdout.flush()
    os._exit(0)  # probed libraries need no cleanup, and some crash in it
