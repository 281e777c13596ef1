"""RendezvousFlags: what they refuse, and when they do nothing."""

import os
import shlex

import pytest
import tyro

from partial_fc.comm.launch import detect, meet_nodes, start
from partial_fc.flags import LaunchFlags, RendezvousFlags

HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CONTROLLER": "gloo",
}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(("RANK", "SIZE"), "34", strict=True)}
OPEN_MPI |= {f"OMPI_COMM_WORLD_LOCAL_{name}": value for name, value in zip(("RANK", "SIZE"), "12", strict=True)}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def parse(words: str = "") -> RendezvousFlags:
    return tyro.cli(RendezvousFlags, args=shlex.split(words))


@pytest.fixture
def environ(monkeypatch):
    """As nobody has started this process."""
    for name in os.environ:
        if name.startswith(("HOROVOD_", "OMPI_", "PMI_", "SLURM_")) or name in (*TORCHRUN, detect.PARENT):
            monkeypatch.delenv(name)
    return monkeypatch


def test_defaults_are_caffe2s():
    found = parse()
    assert (found.num_shards, found.shard_id, found.run_id, found.redis_host) == (1, 0, None, None)
    assert found.redis_port == 6379
    assert str(found.file_store_path) == "/tmp"


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
    environ.setenv(detect.PARENT, "1")
    assert start._start_shard(parse("--num_shards 2 --run_id x --redis_host nowhere.invalid"), LaunchFlags()) is None


@pytest.mark.parametrize(
    ("launcher", "variables"), [("horovodrun", HOROVODRUN), (r"mpirun \(Open MPI\)", OPEN_MPI), ("torchrun", TORCHRUN)]
)
def test_under_a_launcher_shards_come_from_it(environ, capsys, launcher, variables):
    """4 processes, 2 on each host; this is the last one."""
    for name, value in variables.items():
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


def test_gloo_listens_where_the_hosts_reach_each_other(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = meet_nodes.Found("127.0.0.1", 1, "127.0.0.1", "secret")
    told = start._environment(found, None)
    assert (told["GLOO_SOCKET_IFNAME"], told["PARTIAL_FC_SECRET"]) == ("lo", "secret")
    assert "GLOO_SOCKET_IFNAME" not in start._environment(found, "eth0")  # the processes set it
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert start._environment(found, None)["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_port_that_is_taken_is_refused():
    with start._listen("127.0.0.1", None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--master-port {port}: cannot listen there"):
            start._listen("127.0.0.1", port)
