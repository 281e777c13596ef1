"""Whoever listens while a job runs stands in SECURITY.md, launcher by launcher, on one host and on two."""

import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.two_hosts import ADDRESSES
from tests.cluster.stranger import listeners
from tests.cluster.test_two_hosts import HOSTS
from tests.recipes.conftest import ROOT

RECIPE = str(ROOT / "tests/recipes/rendezvous_job.py")
TRAIN = [sys.executable, "train.py", RECIPE]
LOCAL = "-np 2 -H localhost:2"
NETWORK = "--network-interfaces eth0 --disable-cache"
REMOTE = f"-np 2 -H {HOSTS} {NETWORK}"
ELASTIC = "--min-np 2 --max-np 2 --host-discovery-script"
TORCHRUN = f"torchrun --nnodes=2 --nproc_per_node=1 --master_addr={ADDRESSES[0]} --master_port=8887"


def commands(folder: Path) -> dict[tuple[str, int], list[list[str]]]:
    """(launcher, hosts) -> what is typed on the first host, or on each; the job's own words follow."""
    (folder / "discover").write_text("#!/bin/sh\n" + "".join(f"echo {address}:1\n" for address in ADDRESSES))
    (folder / "discover").chmod(0o755)
    (folder / "hosts").write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    own = [*TRAIN, "--nodes", "2", "--master-addr", ADDRESSES[0], "--master-port", "8888"]
    train = shlex.join(["train.py", RECIPE])
    typed = {
        ("--gpus, --nodes", 1): [f"{shlex.join(TRAIN)} --gpus 2"],
        ("--gpus, --nodes", 2): [f"{shlex.join(own)} --nr {host}" for host in (0, 1)],
        ("torchrun", 1): [f"torchrun --standalone --nproc_per_node=2 {train}"],
        ("torchrun", 2): [f"{TORCHRUN} --node_rank={host} {train}" for host in (0, 1)],
        ("horovodrun --gloo", 1): [f"horovodrun --gloo {LOCAL} bash config.sh"],
        ("horovodrun --gloo", 2): [f"horovodrun --gloo {REMOTE} bash config.sh"],
        ("horovodrun, elastic", 2): [f"horovodrun -np 2 {ELASTIC} {folder}/discover {NETWORK} bash config.sh"],
        ("run.sh", 1): ["bash run.sh"],
        ("run.sh", 2): [f"bash run.sh {folder}/hosts"],
    }
    return {key: [shlex.split(line) for line in lines] for key, lines in typed.items()}


def table() -> dict[tuple[str, int], set[tuple[str, str]]]:
    """SECURITY.md's: (launcher, hosts) -> who listens, and where."""
    found: dict[tuple[str, int], set[tuple[str, str]]] = {}
    rows = re.findall(r"^\| (.*) \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    cells = [[cell.strip(" `") for cell in row.split(" | ")] for row in rows]
    for launcher, who, _, *places, _ in (row for row in cells if len(row) == 6):
        for hosts, cell in enumerate(places, 1):
            entries = found.setdefault((launcher, hosts), set())
            entries |= {(who, place) for place in cell.split(", ") if place != "none"}
    return found


def place_of(address: str) -> str:
    if address.startswith("127.") or address == "::1":
        return "loopback"
    return "network" if address in ADDRESSES else "all"


@pytest.mark.long
def test_whoever_listens_stands_in_security_md(hosts, env, tmp_path):
    """All launchers side by side, each with a job that only waits."""
    env = env | {"PYTHONPATH": str(ROOT), "RECIPE": RECIPE, "NETWORK_INTERFACE": "eth0"}
    expected, found = table(), {}
    with ExitStack() as stack:
        started = {}
        for key, typed in commands(tmp_path).items():
            marker = tmp_path / re.sub(r"\W+", "-", f"{key[0]}-{key[1]}")
            more = ["--until", str(marker / "end"), "--start-timeout", "150"]
            marker.mkdir()
            processes = []
            for host, words in enumerate(typed):
                log = stack.enter_context((marker / f"log.{host}").open("w"))
                pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
                processes.append(hosts.start(host, ["timeout", "200", *words, *more], env=env, **pipes))
            started[key] = (marker, processes)
        for key, (marker, processes) in started.items():
            while len(re.findall("rank . of 2, . of . here: 3", said(marker))) < 2:
                assert all(process.poll() is None for process in processes), f"{key}: {said(marker)[-3000:]}"
                time.sleep(0.1)
            seen = {one for pid in hosts.pids for one in listeners(pid, str(marker))}
            found[key] = {(who, place_of(address)) for who, address, _ in seen}
            (marker / "end").touch()
        for key, (marker, processes) in started.items():
            for process in processes:
                assert process.wait() == 0, f"{key}: {said(marker)[-3000:]}"
    assert found == {key: places for key, places in expected.items() if key in found}


def said(marker: Path) -> str:
    return "".join(log.read_text(errors="replace") for log in sorted(marker.glob("log.*")))


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Nothing of this shell's says which network to use."""
    for name in [name for name in os.environ if name.startswith(("GLOO_", "HOROVOD_", "OMPI_MCA_btl", "MASTER_"))]:
        monkeypatch.delenv(name)
