"""How we were launched, read from the environment; what the flags that start or find processes refuse."""

import os
import shlex
import socket

import psutil
import pytest
import torch
import tyro

from partial_fc import comm
from partial_fc.comm import Launch, detect, device
from partial_fc.comm.launch import addresses, meet_nodes, start
from partial_fc.comm.launch.detect import MPI_YIELD, PARENT, mpi_settings
from partial_fc.flags import LaunchFlags, RendezvousFlags

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SPAWNED = TORCHRUN | {"PARTIAL_FC_PARENT": "4711"}
LAUNCHED = TORCHRUN | {"PARTIAL_FC_LAUNCHER": "partial-fc launch"}
HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CONTROLLER": "gloo",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


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
    for name in os.environ:
        if name.startswith(("HOROVOD_", "OMPI_", "PMI_", "SLURM_")) or name in (
            *TORCHRUN,
            PARENT,
            *addresses.VARIABLES,
        ):
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


# ---- --num-shards


def parse(words: str = "") -> RendezvousFlags:
    return tyro.cli(RendezvousFlags, args=shlex.split(words))


@pytest.mark.parametrize(
    ("words", "launch", "message"),
    [
        ("--num_shards 2", LaunchFlags(), "--num-shards 2 needs --run-id"),
        ("--num_shards 2 --run_id x", LaunchFlags(nodes=2, master_addr="h"), "--nodes and --num-shards are two ways"),
        ("--num_shards 2 --run_id x", LaunchFlags(master_addr="h"), "--master-addr and --num-shards are two ways"),
    ],
)
def test_what_does_not_go_together_is_refused(environ, words, launch, message):
    with pytest.raises(ValueError, match=message):
        start._start_shard(parse(words), launch)


def test_one_shard_meets_nobody_and_writes_nothing(environ, tmp_path, capsys):
    assert start._start_shard(parse(f"--run_id x --file_store_path {tmp_path}"), LaunchFlags(gpus=2)) is None
    assert list(tmp_path.iterdir()) == []
    assert not capsys.readouterr().err
    assert start._start_shard(parse("--redis_host nowhere.invalid"), LaunchFlags()) is None
    assert capsys.readouterr().err == "note: --redis-host without effect: one shard meets no others\n"


def test_a_process_that_was_started_here_meets_nobody_again(environ):
    environ.setenv(PARENT, "1")
    assert start._start_shard(parse("--num_shards 2 --run_id x --redis_host nowhere.invalid"), LaunchFlags()) is None


@pytest.mark.parametrize(
    ("launcher", "variables"), [("horovodrun", HOROVODRUN), (r"mpirun \(Open MPI\)", MPIRUN), ("torchrun", TORCHRUN)]
)
def test_under_a_launcher_shards_come_from_it(environ, capsys, launcher, variables):
    """4 processes, 2 on each host; this is the last one."""
    for name, value in {**variables, **dict(zip(variables, "3412", strict=False))}.items():
        environ.setenv(name, value)
    for words in ("", "--run_id x", "--num_shards 2", "--num_shards 2 --shard_id 1"):
        assert start._start_shard(parse(words), LaunchFlags()) is None
    assert not capsys.readouterr().err
    assert start._start_shard(parse("--num_shards 2 --redis_host h"), LaunchFlags()) is None
    assert "says where the others are" in capsys.readouterr().err
    for words in ("--num_shards 4", "--num_shards 3 --shard_id 2", "--num_shards 4 --shard_id 3"):
        with pytest.raises(
            ValueError, match=rf"--num-shards \d, but {launcher} has started this process as rank 3 of 4"
        ):
            start._start_shard(parse(words), LaunchFlags())


@pytest.mark.parametrize("said", [None, "eth7"])
def test_gloo_listens_where_the_hosts_reach_each_other(environ, tmp_path, said):
    if said:
        environ.setenv("GLOO_SOCKET_IFNAME", said)
    environ.setattr(meet_nodes, "find", lambda *_: ("127.0.0.1", 1))
    environ.setattr(start, "_spawn", lambda *_, **more: more["environ"].get("GLOO_SOCKET_IFNAME"))
    second = parse(f"--num_shards 2 --shard_id 1 --run_id x --file_store_path {tmp_path}")
    assert start._start_shard(second, LaunchFlags()) == (said or "lo")
    assert start._start_shard(second, LaunchFlags(network_interface="eth0")) == said  # the processes set it


def test_a_port_that_is_taken_is_refused():
    with start._listen("127.0.0.1", None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--master-port {port}: cannot listen there"):
            start._listen("127.0.0.1", port)
