"""Whoever listens while a job runs stands in SECURITY.md, launcher by launcher, on one host and on two."""

import contextlib
import os
import re
import socket
import struct
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks.hosts.two_hosts import ADDRESSES, TwoHosts
from tests.cluster.conftest import commands
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


def listeners(host: int, of: str) -> set[tuple[str, str, int]]:
    """Who of a job listens on a host: what the process is, address, port. host: a process that is there, seen from
    outside of it, as root; of: a word in the command line of the job's processes."""
    network = os.readlink(f"/proc/{host}/ns/net")
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            # orted's own words do not name its job; those of its processes do.
            family = process.children(recursive=True) if "orted" in " ".join(words[:1]) else [process]
            is_ours = any(of in " ".join(one.cmdline()) for one in family)
            if is_ours and os.readlink(f"/proc/{process.pid}/ns/net") == network:
                found |= {(_what(words, process.environ()), *at) for at in _listening(process.pid)}
    return found


def _listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports of a process, in its own network (psutil takes its reader's); see proc_net_tcp(5)."""
    numbers = os.listdir(f"/proc/{pid}/fd")
    own = {os.readlink(f"/proc/{pid}/fd/{number}") for number in numbers if os.path.exists(f"/proc/{pid}/fd/{number}")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                address, _, port = local.partition(":")
                # Words of 32 bits, each in this machine's own order.
                words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)))
    return found


def _what(words: list[str], environ: dict[str, str]) -> str:
    programs = [Path(word).name for word in words[:3]]
    for launcher in ("horovodrun", "torchrun", "mpirun", "orted"):
        if launcher in programs:
            return launcher
    for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"):
        if name in environ:
            return "rank 0" if environ[name] == "0" else "other ranks"
    return " ".join(words)[:80]


def said(marker: Path) -> str:
    return "".join(log.read_text(errors="replace") for log in sorted(marker.glob("log.*")))


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Nothing of this shell's says which network to use."""
    for name in [name for name in os.environ if name.startswith(("GLOO_", "HOROVOD_", "OMPI_MCA_btl", "MASTER_"))]:
        monkeypatch.delenv(name)
