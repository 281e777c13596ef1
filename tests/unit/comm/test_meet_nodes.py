"""Hosts that look for shard 0 through a real Redis server or a real folder. (What the ranks then find:
tests/recipes/launchers/test_rendezvous.py.)"""

import json
import socket
import threading

import pytest

from partial_fc.comm import StartError
from partial_fc.comm.auth.handshake import Handshake
from partial_fc.comm.launch import addresses, meet_nodes, stores
from partial_fc.comm.launch.meet_nodes import Shard0
from tests.redis_server import redis_server

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def redis_port():
    with redis_server() as port:
        yield port


@pytest.fixture(params=["redis", "folder"])
def opened(request, tmp_path):
    """Opens the run's store."""
    if request.param == "folder":
        return lambda: stores.FileStore(tmp_path, "run")
    import redis

    port = request.getfixturevalue("redis_port")
    redis.Redis("127.0.0.1", port).flushall()
    return lambda: stores.open_redis("127.0.0.1", port, "run", 5)


@pytest.fixture
def shard():
    """Shard 0, whose rank 0 answers."""
    listening = socket.create_server(("127.0.0.1", 0))
    shard = Shard0.here(["127.0.0.2", "127.0.0.1"], listening.getsockname()[1])
    answers = Handshake(listening, 1234, shard.secret, 2)
    yield shard
    answers.close()


def test_shard_0_is_found_where_it_answers_and_nothing_is_left(opened, shard):
    """An address of a host may be nobody's elsewhere."""
    found = []
    late = threading.Thread(target=lambda: found.append(meet_nodes.find(opened(), 1, 20.0)))
    late.start()  # may come first
    with meet_nodes.announced(opened(), shard) as own:
        late.join(30)
        assert found == [meet_nodes.Found("127.0.0.1", shard.port, "127.0.0.1", shard.secret)]
        assert own == meet_nodes.Found(addresses.ANY, shard.port, "", shard.secret)
    store = opened()
    assert store.read() is None
    store.close()


def test_a_run_id_in_use_is_refused_with_what_removes_it(opened, shard):
    with meet_nodes.announced(opened(), shard):
        with (
            pytest.raises(StartError, match=f"the run id is in use, says .*shard 0: {HOST}.*another --run-id") as error,
            meet_nodes.announced(opened(), shard),
        ):
            pass
        assert "redis-cli -h 127.0.0.1" in str(error.value) or "`rm " in str(error.value)
        assert meet_nodes.find(opened(), 1, 5.0).secret == shard.secret  # it is left alone


def test_shard_0_is_missing(opened):
    with pytest.raises(StartError, match=rf"shard 1 on {HOST}: shard 0 .*within 0.3 s.*--run-id"):
        meet_nodes.find(opened(), 1, 0.3)


def test_shard_0_that_does_not_answer_is_named(opened, monkeypatch):
    monkeypatch.setattr(meet_nodes, "_PROBE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        strange = ["", "." * 300, "a" * 70 + ".example", "\x00", "-1"]
        with (
            meet_nodes.announced(opened(), Shard0("shard 0: h", [*strange, "127.0.0.1"], port, "s")),
            pytest.raises(StartError, match=rf"shard 0: h does not answer at port {port} of .*--network-interface"),
        ):
            meet_nodes.find(opened(), 1, 0.3)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[" * 5000,
        "[1, 2]",
        '{"who": "a"}',
        json.dumps({"who": "h", "addresses": [], "port": 65536, "secret": "s"}),
        "\x1b[31mred\r\n",
    ],
)
def test_what_another_program_wrote_is_an_error(opened, text):
    store = opened()
    assert store.announce(text) is None
    with pytest.raises(StartError, match="which no host of a run has written") as error:
        meet_nodes.find(opened(), 1, 1.0)
    assert str(error.value).isprintable()
    store.close()


def test_a_server_that_fails_is_named():
    with redis_server() as port:
        store = stores.open_redis("127.0.0.1", port, "run", 5)
    with pytest.raises(StartError, match=rf"shard 1 on {HOST}: Redis at 127.0.0.1:{port}, key partial-fc:run failed"):
        meet_nodes.find(store, 1, 5.0)
