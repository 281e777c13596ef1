"""How we were launched, read from the environment; what the flags that start or find processes refuse."""

import math
import os
import socket

import psutil
import pytest
import torch

from partial_fc import comm
from partial_fc.comm import Launch, detect, device
from partial_fc.comm.launch import addresses, start
from partial_fc.comm.launch.detect import MPI_YIELD, PARENT, mpi_settings
from partial_fc.flags import LaunchFlags
from tests.world.test_launchers import env, numbered

TORCHRUN = env("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500")
SPAWNED = TORCHRUN | {"PARTIAL_FC_PARENT": "4711"}
LAUNCHED = TORCHRUN | {"PARTIAL_FC_LAUNCHER": "partial-fc launch"}
HOROVODRUN = numbered("HOROVOD_", 3, 4, 1, 2) | env("HOROVOD_CONTROLLER=gloo")
MPIRUN = numbered("OMPI_COMM_WORLD_", 0, 2, 0, 1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SPAWNED, Launch("torch", 1, 2, 1, 2, "--nodes and --gpus", "10.0.0.1", 29500)),
        (LAUNCHED, Launch("torch", 1, 2, 1, 2, "partial-fc launch", "10.0.0.1", 29500)),
        ({**MPIRUN, **HOROVODRUN}, Launch("horovod", 3, 4, 1, 2, "horovodrun")),
    ],
)
def test_our_own_launchers_and_one_inside_another_are_recognised(environ, expected):
    """(All others: tests/world/test_launchers.py.)"""
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "2", "expected 0 <= rank < size"),
        ("RANK", "-1", "expected 0 <= rank < size"),
        ("LOCAL_RANK", "2", "expected 0 <= rank < size"),
        ("WORLD_SIZE", "1", "expected 0 <= rank < size"),
        ("RANK", "one", "RANK='one' is not a whole number"),
        *(("MASTER_PORT", port, "expected a port between 1 and 65535") for port in ("0", "65536", "-1")),
    ],
)
def test_numbers_that_cannot_be(name, value, words):
    with pytest.raises(ValueError, match=words):
        detect({**TORCHRUN, name: value})


@pytest.fixture
def environ(monkeypatch):
    """The environment of this process, without what a launcher set."""
    others = (*TORCHRUN, PARENT, *addresses.VARIABLES)
    for name in os.environ:
        if name.startswith(("HOROVOD_", "OMPI_", "PMI_", "SLURM_")) or name in others:
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("variables", [TORCHRUN, HOROVODRUN, MPIRUN])
def test_flags_that_start_processes_are_refused_under_another_launcher(environ, variables):
    for name, value in variables.items():
        environ.setenv(name, value)
    launcher = detect().launcher.split()[0]
    with pytest.raises(ValueError, match=rf"{launcher}.* has started this process as rank.*leave --gpus 2 away"):
        start.start(LaunchFlags(gpus=2))
    with pytest.raises(ValueError, match="--nodes 2, --nr 1, --master-addr a"):
        start.start(LaunchFlags(nodes=2, nr=1, master_addr="a"))
    assert start.start(LaunchFlags(comm_timeout=5)) is None


def test_one_process_starts_none_and_says_what_that_makes_useless(environ, capsys):
    assert start.start(LaunchFlags()) is None
    assert not capsys.readouterr().err
    assert start.start(LaunchFlags(master_addr="10.0.0.1", master_port=8888)) is None
    assert "--master-addr 10.0.0.1, --master-port 8888 without effect" in capsys.readouterr().err


def test_a_network_interface_is_set_for_every_backend():
    environ = {"PATH": "/bin"}
    addresses.choose("lo", environ)
    assert environ == {
        "PATH": "/bin",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "HOROVOD_GLOO_IFACE": "lo",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    }


@pytest.mark.parametrize("name", addresses.VARIABLES)
def test_a_network_interface_must_not_contradict_the_environment(name):
    environ = {name: "eth77"}
    with pytest.raises(ValueError, match=f"says {name}=eth77"):
        addresses.choose("lo", environ)
    assert environ == {name: "eth77"}
    addresses.choose("lo", {name: "eth77,lo"})


@pytest.mark.parametrize(("said", "agrees"), [("=lo", True), ("^docker0,eth", True), ("^lo", False), ("=eth0", False)])
def test_the_patterns_of_nccl(said, agrees):
    environ = {"NCCL_SOCKET_IFNAME": said}
    if agrees:
        addresses.choose("lo", environ)
        assert environ["NCCL_SOCKET_IFNAME"] == "=lo"
    else:
        with pytest.raises(ValueError, match="NCCL_SOCKET_IFNAME"):
            addresses.choose("lo", environ)


def test_interfaces_are_those_that_psutil_finds():
    theirs = {
        name: next((entry.address for entry in each if entry.family == socket.AF_INET), "")
        for name, each in psutil.net_if_addrs().items()
    }
    assert addresses.by_interface() == theirs
    assert addresses.interface_of("127.0.0.1") == addresses.loopback()


@pytest.mark.parametrize(("name", "words"), [("ib0", "has no IPv4 address"), ("eth77", "does not exist")])
def test_a_network_interface_that_cannot_be_used_is_an_error_that_lists_the_others(monkeypatch, name, words):
    monkeypatch.setattr(addresses, "by_interface", lambda: {"ib0": "", "lo": "127.0.0.1"})
    with pytest.raises(ValueError, match=rf"{name}: {words} on .*; there are lo \(127\.0\.0\.1\)$"):
        addresses.choose(name, {})
    addresses.choose("lo", {})


def all_of(num: int) -> tuple[str, set[int]]:
    return "here", set(range(num))


@pytest.mark.parametrize(
    ("given", "others", "expected"),
    [
        (None, [], [8]),
        (None, [all_of(8)], [4]),
        (None, [all_of(8)] * 2, [2]),
        (None, [all_of(8)] * 15, [1]),
        (None, [("elsewhere", set(range(8)))], [8]),
        (None, [("here", set(range(8, 16)))], [8]),  # bound by the launcher: each has its own
        (None, [("here", {6, 7, 8, 9})], [7]),
        ("3", [all_of(8)], []),
    ],
)
def test_processes_share_the_cores_that_they_have_in_common(monkeypatch, given, others, expected):
    asked: list[int] = []
    monkeypatch.setattr(device.torch, "set_num_threads", asked.append)
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(device.socket, "gethostname", lambda: "here")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(device.comm, "all_gather_json", lambda own, *_: [own, *([at, *used] for at, used in others)])
    device.share_cores(comm.SingleWorld())
    assert asked == expected


@pytest.mark.parametrize(
    ("num_cores", "quota", "num_ranks", "threads"),
    [(8, math.inf, 1, 7), (8, math.inf, 2, 3), (8, 6.0, 2, 2), (1, math.inf, 1, 1), (4, 0.5, 4, 1), (64, 100, 1, 16)],
)
def test_decoding_takes_the_cores_but_one(monkeypatch, num_cores, quota, num_ranks, threads):
    monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(device.memory, "cores_allowed", lambda: quota)
    monkeypatch.setattr(device.comm, "all_gather_json", lambda own, *_: [own] * num_ranks)
    assert device.decoding_threads("auto", comm.SingleWorld()) == threads
    assert device.decoding_threads(5, comm.SingleWorld()) == 5


def test_a_recipe_joins_or_ends_with_the_status_of_those_it_started(environ, monkeypatch):
    environ.setenv("OMP_NUM_THREADS", "1")
    world, its_device = device.join(LaunchFlags(device="cpu"))
    assert (world.backend, world.size, its_device) == ("single", 1, torch.device("cpu"))
    monkeypatch.setattr(start, "start", lambda _: 3)
    with pytest.raises(SystemExit) as end:
        device.join(LaunchFlags(device="cpu"))
    assert end.value.code == 3


@pytest.mark.parametrize(
    ("num_cores", "num_processes", "threads", "yields"),
    [
        (2, 2, "1", True),
        (16, 2, "1", False),
        (16, 2, "8", True),
        (16, 2, "8,2", True),
        (16, 2, None, True),  # they divide the cores
        (2, 1, "1", False),
        (1, 4, None, True),
    ],
)
def test_ranks_that_wait_in_mpi_leave_their_cores_where_all_are_in_use(num_cores, num_processes, threads, yields):
    launch = Launch("horovod", 0, num_processes, 0, num_processes)
    environ = {"OMPI_COMM_WORLD_LOCAL_SIZE": str(num_processes)} | ({"OMP_NUM_THREADS": threads} if threads else {})
    assert mpi_settings(launch, num_cores, environ) == ({MPI_YIELD: "1"} if yields else {})
    # The user's own word stays; so do processes that MPI has not started.
    assert mpi_settings(launch, num_cores, environ | {MPI_YIELD: "0"}) == {}
    assert mpi_settings(launch, num_cores, {"OMP_NUM_THREADS": "1"}) == {}
