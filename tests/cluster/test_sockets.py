"""Whoever listens while a job runs stands in SECURITY.md, launcher by launcher, on one host and on two."""

import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.hosts.two_hosts import ADDRESSES, TwoHosts
from tests.cluster.conftest import commands
from tests.cluster.stranger import listeners
from tests.running import ROOT

RECIPE = str(ROOT / "tests/recipes/launchers/rendezvous_job.py")
PATIENT = ["--start-timeout", "300"]


def table() -> dict[tuple[str, int], set[tuple[str, str]]]:
    """SECURITY.md's: (launcher, hosts) -> who listens, and where."""
    found: dict[tuple[str, int], set[tuple[str, str]]] = {}
    rows = re.findall(r"^\| (.*) \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    cells = [[cell.strip(" `") for cell in row.split(" | ")] for row in rows]
    for launcher, who, _, *places in (row for row in cells if len(row) == 5):
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
    typed = commands(tmp_path, RECIPE)

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
