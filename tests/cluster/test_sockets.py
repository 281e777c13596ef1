"""Whoever listens while a job runs stands in SECURITY.md, launcher by launcher, on one host and on two."""

import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.two_hosts import ADDRESSES, TwoHosts
from tests.cluster.stranger import listeners
from tests.cluster.test_two_hosts import HOSTS
from tests.recipes.conftest import ROOT

RECIPE = str(ROOT / "tests/recipes/launchers/rendezvous_job.py")
TRAIN = [sys.executable, "train.py", RECIPE]
PATIENT = ["--start-timeout", "300"]
LOCAL = "--start-timeout 300 -np 2 -H localhost:2"
NETWORK = "--network-interfaces eth0 --disable-cache"
REMOTE = f"--start-timeout 300 -np 2 -H {HOSTS} {NETWORK}"
ELASTIC = "--min-np 2 --max-np 2 --host-discovery-script"
TORCHRUN = f"torchrun --nnodes=2 --nproc_per_node=1 --master_addr={ADDRESSES[0]} --master_port=8887"


def commands(folder: Path) -> dict[tuple[str, int], list[list[str]]]:
    """(launcher, hosts) -> what is typed on the first host, or on each; the job's own words follow."""
    for number, found in enumerate((["localhost:2"], [f"{address}:1" for address in ADDRESSES]), 1):
        (folder / f"discover-{number}").write_text("#!/bin/sh\n" + "".join(f"echo {one}\n" for one in found))
        (folder / f"discover-{number}").chmod(0o755)
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
        ("horovodrun, elastic", 1): [
            f"horovodrun -np 2 {ELASTIC} {folder}/discover-1 --network-interfaces lo bash config.sh"
        ],
        ("horovodrun, elastic", 2): [f"horovodrun -np 2 {ELASTIC} {folder}/discover-2 {NETWORK} bash config.sh"],
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
    """Of each launcher a job that only waits, some of them at a time."""
    env = env | {"PYTHONPATH": str(ROOT), "RECIPE": RECIPE, "NETWORK_INTERFACE": "eth0"}
    typed = commands(tmp_path)

    def seen(key: tuple[str, int]) -> set[tuple[str, str]]:
        return who_listens(hosts, env, tmp_path / re.sub(r"\W+", "-", f"{key[0]}-{key[1]}"), typed[key])

    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(typed, pool.map(seen, typed), strict=True))
    assert found == {key: places for key, places in table().items() if key in found}


def who_listens(hosts: TwoHosts, env: dict[str, str], folder: Path, typed: list[list[str]]) -> set[tuple[str, str]]:
    """Who of a job, and where, when its ranks have met; the job has ended then. AssertionError: it does not run."""
    folder.mkdir()
    with ExitStack() as stack:
        processes = []
        for host, words in enumerate(typed):
            log = stack.enter_context((folder / f"log.{host}").open("w"))
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            limited = ["timeout", "--kill-after=5", "400", *words, "--until", str(folder / "end"), *PATIENT]
            processes.append(hosts.start(host, limited, env=env, **pipes))
            stack.callback(processes[-1].terminate)
        while len(re.findall("rank . of 2, . of . here: 3", said(folder))) < 2:
            assert all(process.poll() is None for process in processes), said(folder)[-3000:]
            time.sleep(0.1)
        found = {one for pid in hosts.pids for one in listeners(pid, str(folder))}
        (folder / "end").touch()
        for process in processes:
            assert process.wait() == 0, said(folder)[-3000:]
    return {(who, place_of(address)) for who, address, _ in found}


def said(marker: Path) -> str:
    return "".join(log.read_text(errors="replace") for log in sorted(marker.glob("log.*")))


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Nothing of this shell's says which network to use."""
    for name in [name for name in os.environ if name.startswith(("GLOO_", "HOROVOD_", "OMPI_MCA_btl", "MASTER_"))]:
        monkeypatch.delenv(name)
