"""Workers, servers and scheduler of MXNet on this machine, for tests; run as a worker: several checks in one launch."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.recipes.conftest import ROOT, environment

# The test vector: a gradient and twice as much of it, on two workers.
GRADIENT = np.array([0.2, 0.6, -0.5, 1.7, 0.49, -3.0, 1e-3, 0.5, -0.26], np.float32)
NUM_PUSHES, THRESHOLD = 4, 0.5


def recipe(flags: str) -> list[str]:
    return [sys.executable, "train.py", "mnist", "--engine", "mxnet", *shlex.split(flags)]


class Launch:
    """A job on loopback. `without`: a role that is not started."""

    def __init__(self, command: list[str], folder: Path, num_workers: int = 2, num_servers: int = 1, without: str = ""):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_NUM_WORKER": str(num_workers),
            "DMLC_NUM_SERVER": str(num_servers),
        }
        counts = {"scheduler": 1, "server": num_servers, "worker": num_workers}
        self.outputs: dict[str, Path] = {}
        self.processes: dict[str, subprocess.Popen] = {}
        for role, number in ((role, i) for role, count in counts.items() for i in range(count) if role != without):
            name = f"{role} {number}"
            self.outputs[name] = folder / f"{role}-{number}.txt"
            variables = {**environment(), **shared, "DMLC_ROLE": role, "DMLC_TASK_ID": str(number)}
            with self.outputs[name].open("wb") as output:
                self.processes[name] = subprocess.Popen(
                    command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT
                )

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait()

    def statuses(self, names: str, within_s: float = 120) -> dict[str, int | None]:
        """Waits for the processes whose name begins so. None: it goes on."""
        end = time.monotonic() + within_s
        found = [name for name in self.processes if name.startswith(names)]
        while time.monotonic() < end and any(self.processes[name].poll() is None for name in found):
            time.sleep(0.05)
        return {name: self.processes[name].poll() for name in found}

    def text(self) -> str:
        return "".join(f"---- {name}\n{path.read_text()}" for name, path in self.outputs.items())


def run(command: list[str], folder: Path, num_servers: int = 1) -> str:
    """Runs a job of two workers to the end; returns what all of it printed. All must end well."""
    with Launch(command, folder, num_servers=num_servers) as launch:
        statuses = launch.statuses("")
        assert set(statuses.values()) == {0}, f"{statuses}\n{launch.text()[-6000:]}"
        return launch.text()


def main() -> None:
    """A worker: the pulls of the test vector go to argv[1]-RANK.npy, then the recipe trains with argv[2:]."""
    from partial_fc.mxnet import kvstore, mx
    from recipes import mnist_kvstore

    with kvstore.joined("dist_sync", 30) as job:
        store = job.store
        store.set_gradient_compression({"type": "2bit", "threshold": THRESHOLD})
        store.init("vector", mx.nd.zeros(len(GRADIENT)))
        pulls = []
        for _ in range(NUM_PUSHES):
            pulled = mx.nd.zeros(len(GRADIENT))
            store.pushpull("vector", mx.nd.array(GRADIENT * (1 + job.rank)), out=pulled)
            pulls.append(pulled.asnumpy())
        np.save(f"{sys.argv[1]}-{job.rank}.npy", np.stack(pulls))
        mnist_kvstore.train(mnist_kvstore.parse(sys.argv[2:]), job)


if __name__ == "__main__":
    if os.environ["DMLC_ROLE"] == "worker":
        main()
    else:
        import partial_fc.mxnet  # noqa: F401
