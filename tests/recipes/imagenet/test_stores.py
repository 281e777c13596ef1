"""How hosts without a launcher find shard 0: in a real Redis server and real folders, and what --num-shards refuses.
(What the ranks then find: tests/recipes/launchers/test_rendezvous.py.)"""

import json
import os
import shlex
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tyro

from partial_fc.comm import StartError
from partial_fc.comm.launch.detect import PARENT
from partial_fc.flags import LaunchFlags
from recipes.imagenet.rendezvous import shard0, start, stores
from recipes.imagenet.rendezvous.shard0 import Shard0
from recipes.imagenet.rendezvous.start import RendezvousFlags
from recipes.imagenet.rendezvous.stores import FileStore, RedisStore
from tests.redis_server import redis_server, skip_without
from tests.unit.comm import test_launch
from tests.waiting import free_port

HOST = socket.gethostname()
environ = test_launch.environ


@pytest.fixture(scope="module")
def port():
    with redis_server() as port:
        yield port


@pytest.fixture(scope="module")
def connect(port):
    import redis

    return lambda **more: redis.Redis("127.0.0.1", port, protocol=2, **more)


def open_at(port: int, timeout_s: float = 0.5, run_id: str = "r", **more) -> RedisStore:
    return stores.open_redis("127.0.0.1", port, run_id, timeout_s, **more)


@pytest.fixture(params=["redis", "folder"])
def opened(request, tmp_path):
    """Opens the store of a run, as a process of it does."""
    if request.param == "folder":
        return lambda: FileStore(tmp_path, "run 1")
    request.getfixturevalue("connect")().flushall()
    return lambda: open_at(request.getfixturevalue("port"), 5, "run 1")


def test_one_of_many_announces_and_removes(opened):
    made = [opened() for _ in range(16)]
    assert made[0].read() is None
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda n: made[n].announce(str(n)), range(16)))
    number = found.index(None)
    assert found.count(None) == 1
    assert set(found) - {None} == {str(number).encode()}
    for n, store in enumerate(made):
        assert bool(store.mine) == (n == number)
        if n != number:
            store.close()
    late = opened()
    assert late.read() == str(number).encode()
    made[number].close()
    assert late.read() is None
    late.close()


def test_the_announcement_of_a_run_that_took_the_place_stays(opened):
    first, second = opened(), opened()
    first.announce("first")
    first.remove()  # as by hand, with `leftover`
    second.announce("second")
    first.close()
    assert second.read() == b"second"
    second.close()


# ---- Redis


def test_a_key_expires_unless_it_is_refreshed(connect):
    client = connect()
    store = RedisStore(connect(), "expires", expire_s=1)
    store.announce("1")
    assert 0 < client.pttl(store.key) <= 1000
    time.sleep(1.3)
    assert store.read() == b"1"  # refreshed
    store.mine = b""  # as if killed
    store.close()
    time.sleep(1.1)
    assert not client.exists(store.key)


def test_a_server_that_is_not_there_is_an_error_in_time():
    skip_without()
    port, started = free_port(), time.monotonic()
    with pytest.raises(StartError, match=rf"Redis at 127.0.0.1:{port} does not answer after 0.5 s: .*--redis-host"):
        open_at(port)
    assert time.monotonic() - started < 20


def test_a_wrong_password_is_an_error_at_once():
    with redis_server("--requirepass", "right") as port:
        open_at(port, password="right").close()
        for wrong in ({}, {"password": "wrong"}, {"username": "nobody", "password": "right"}):
            with pytest.raises(StartError, match=r"refuses this process.*REDIS_PASSWORD"):
                open_at(port, 20, **wrong)


# ---- folders


def test_a_file_is_for_its_owner_alone(tmp_path):
    store = FileStore(tmp_path, "a/../b é")
    store.announce("1")
    (path,) = tmp_path.iterdir()
    assert path.name == "partial-fc-a%2F..%2Fb%20%C3%A9"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_others_may_write_is_refused(tmp_path):
    path = tmp_path / "partial-fc-r"
    path.write_text("1")
    path.chmod(0o666)
    with pytest.raises(StartError, match="another user's"):
        FileStore(tmp_path, "r").read()
    if os.geteuid() == 0:  # only root may give files away
        path.chmod(0o600)
        os.chown(path, 12345, 12345)
        with pytest.raises(StartError, match="another user's"):
            FileStore(tmp_path, "r").announce("2")


@pytest.mark.parametrize("shared", ["/sys", "/no/such/folder", "/etc/passwd"])
def test_a_folder_that_cannot_be_written_to_is_an_error(shared):
    with pytest.raises(StartError, match=rf"--file-store-path {shared}: .*the same one on all hosts"):
        FileStore(stores.Path(shared), "r")


def test_what_is_no_plain_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "partial-fc-a", 0o600)
    with pytest.raises(StartError, match="partial-fc-a"):
        FileStore(tmp_path, "a").read()
    (tmp_path / "partial-fc-b").symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        FileStore(tmp_path, "b").read()


# ---- hosts that find shard 0


@pytest.fixture
def shard():
    """Shard 0, whose rank 0 listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield Shard0.here(["127.0.0.2", "127.0.0.1"], listening.getsockname()[1])


def test_shard_0_is_found_where_it_answers_and_nothing_is_left(opened, shard):
    """An address of a host may be nobody's elsewhere."""
    found = []
    late = threading.Thread(target=lambda: found.append(shard0.find(opened(), 1, 20.0)))
    late.start()  # may come first
    with shard0.announced(opened(), shard):
        late.join(30)
        assert found == [("127.0.0.1", shard.port)]
    store = opened()
    assert store.read() is None
    store.close()


def test_a_run_id_in_use_is_refused_with_what_removes_it(opened, shard):
    with shard0.announced(opened(), shard):
        with (
            pytest.raises(StartError, match=f"the run id is in use, says .*shard 0: {HOST}.*another --run-id") as error,
            shard0.announced(opened(), shard),
        ):
            pass
        assert "redis-cli -h 127.0.0.1" in str(error.value) or "`rm " in str(error.value)
        assert shard0.find(opened(), 1, 5.0)[1] == shard.port  # it is left alone


def test_shard_0_is_missing(opened):
    with pytest.raises(StartError, match=rf"shard 1 on {HOST}: shard 0 .*within 0.3 s.*--run-id"):
        shard0.find(opened(), 1, 0.3)


def test_shard_0_that_does_not_answer_is_named(opened, monkeypatch):
    monkeypatch.setattr(shard0, "_PROBE_S", 0.3)
    port = free_port()
    strange = ["", "." * 300, "a" * 70 + ".example", "\x00", "-1"]
    with (
        shard0.announced(opened(), Shard0("shard 0: h", [*strange, "127.0.0.1"], port)),
        pytest.raises(StartError, match=rf"shard 0: h does not answer at port {port} of .*--network-interface"),
    ):
        shard0.find(opened(), 1, 0.3)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[" * 5000,
        "[1, 2]",
        '{"who": "a"}',
        json.dumps({"who": "h", "addresses": [], "port": 65536}),
        "\x1b[31mred\r\n",
    ],
)
def test_what_another_program_wrote_is_an_error(opened, text):
    store = opened()
    assert store.announce(text) is None
    with pytest.raises(StartError, match="which no host of a run has written") as error:
        shard0.find(opened(), 1, 1.0)
    assert str(error.value).isprintable()
    store.close()


def test_a_server_that_fails_is_named():
    with redis_server() as port:
        store = open_at(port, 5)
    with pytest.raises(StartError, match=rf"shard 1 on {HOST}: Redis at 127.0.0.1:{port}, key partial-fc:r failed"):
        shard0.find(store, 1, 5.0)


# ---- the flags


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
        start.start_shard(parse(words), launch)


def test_one_shard_meets_nobody_and_writes_nothing(environ, tmp_path, capsys):
    assert start.start_shard(parse(f"--run_id x --file_store_path {tmp_path}"), LaunchFlags(gpus=2)) is None
    assert list(tmp_path.iterdir()) == []
    assert not capsys.readouterr().err
    assert start.start_shard(parse("--redis_host nowhere.invalid"), LaunchFlags()) is None
    assert capsys.readouterr().err == "note: --redis-host without effect: one shard meets no others\n"


def test_a_process_that_was_started_here_meets_nobody_again(environ):
    environ.setenv(PARENT, "1")
    assert start.start_shard(parse("--num_shards 2 --run_id x --redis_host nowhere.invalid"), LaunchFlags()) is None


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("horovodrun", test_launch.HOROVODRUN),
        (r"mpirun \(Open MPI\)", test_launch.MPIRUN),
        ("torchrun", test_launch.TORCHRUN),
    ],
)
def test_under_a_launcher_shards_come_from_it(environ, capsys, launcher, variables):
    """4 processes, 2 on each host; this is the last one."""
    for name, value in {**variables, **dict(zip(variables, "3412", strict=False))}.items():
        environ.setenv(name, value)
    for words in ("", "--run_id x", "--num_shards 2", "--num_shards 2 --shard_id 1"):
        assert start.start_shard(parse(words), LaunchFlags()) is None
    assert not capsys.readouterr().err
    assert start.start_shard(parse("--num_shards 2 --redis_host h"), LaunchFlags()) is None
    assert "says where the others are" in capsys.readouterr().err
    for words in ("--num_shards 4", "--num_shards 3 --shard_id 2", "--num_shards 4 --shard_id 3"):
        with pytest.raises(
            ValueError, match=rf"--num-shards \d, but {launcher} has started this process as rank 3 of 4"
        ):
            start.start_shard(parse(words), LaunchFlags())


@pytest.mark.parametrize("said", [None, "eth7"])
def test_gloo_listens_where_the_hosts_reach_each_other(environ, tmp_path, said):
    if said:
        environ.setenv("GLOO_SOCKET_IFNAME", said)
    environ.setattr(shard0, "find", lambda *_: ("127.0.0.1", 1))
    environ.setattr(start, "spawn_here", lambda *_, **more: more["environ"].get("GLOO_SOCKET_IFNAME"))
    second = parse(f"--num_shards 2 --shard_id 1 --run_id x --file_store_path {tmp_path}")
    assert start.start_shard(second, LaunchFlags()) == (said or "lo")
    assert start.start_shard(second, LaunchFlags(network_interface="eth0")) == said  # the processes set it


def test_a_port_that_is_taken_is_refused():
    with start._listen("127.0.0.1", None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--master-port {port}: cannot listen there"):
            start._listen("127.0.0.1", port)
