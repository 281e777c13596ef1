"""Hosts that meet in a real Redis server or a real folder; threads stand for the commands that people type there."""

import json
import os
import re
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from partial_fc.comm import StartError
from partial_fc.comm.launch import meet_nodes, stores
from partial_fc.comm.launch.meet_nodes import Node
from tests.redis_server import redis_server

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def redis_port():
    with redis_server() as port:
        yield port


@pytest.fixture(params=["redis", "folder"])
def place(request, tmp_path):
    """(what opens the run's store, what is left in it)."""
    if request.param == "folder":
        left = lambda: sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))  # noqa: E731
        return lambda: stores.open_folder(tmp_path, "run"), left
    import redis

    port = request.getfixturevalue("redis_port")
    client = redis.Redis("127.0.0.1", port)
    client.flushall()
    return lambda: stores.open_redis("127.0.0.1", port, "run", 5), lambda: sorted(map(bytes.decode, client.keys()))


class Command:
    """What is typed on one host, in a thread; it stays until `end`."""

    def __init__(self, place, shard_id, num_shards=2, num_gpus=1, timeout_s=20.0, addresses=("127.0.0.1",)):
        self.met: meet_nodes.Peers | None = None
        self.error = ""
        self.heard = threading.Event()
        self.end = threading.Event()
        self.given = (place[0], shard_id, num_shards, num_gpus, timeout_s, list(addresses))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        opened, shard_id, num_shards, num_gpus, timeout_s, addresses = self.given
        try:
            with ExitStack() as stack:
                listening = stack.enter_context(socket.create_server(("", 0))) if shard_id == 0 else None
                me = Node.here(shard_id, num_shards, num_gpus, addresses if listening else [], listening)
                self.met = stack.enter_context(meet_nodes.meet(opened(), me, listening, timeout_s))
                self.heard.set()
                self.end.wait(60)
        except StartError as error:
            self.error = str(error)
        finally:
            self.heard.set()

    def leave(self):
        self.end.set()
        self.thread.join(30)
        assert not self.thread.is_alive()


def heard(*commands: Command) -> list[str]:
    """The error of each; "" where all is well."""
    for command in commands:
        assert command.heard.wait(40)
        if command.met is None:
            command.leave()
    return [command.error for command in commands]


def left_by_a_killed_one(place, **claims) -> None:
    """What the processes of a run have written that were killed."""
    store = place[0]()
    me = Node(1, 2, 1, "gone", 77, "2026-01-02 03:04:05", "t", "s", [], 0)
    for key, value in claims.items():
        store.set(key.replace("_", " "), value or json.dumps(vars(me)))
    if isinstance(store, stores.RedisStore):
        store.close()


@pytest.mark.parametrize("num_shards", [2, 5])
def test_hosts_meet_and_nothing_is_left(place, num_shards):
    commands = [Command(place, shard, num_shards) for shard in reversed(range(num_shards))]
    assert heard(*commands) == [""] * num_shards
    assert len({command.met for command in commands}) == 1
    met = commands[0].met
    assert met.master_addr == met.own_addr == "127.0.0.1"
    assert place[1]()  # in use
    for command in commands:
        command.leave()
    assert place[1]() == []


def test_a_run_id_may_be_used_again_after_the_end(place):
    for _ in range(3):
        commands = [Command(place, shard) for shard in range(2)]
        assert heard(*commands) == ["", ""]
        for command in commands:
            command.leave()
    assert place[1]() == []


def test_shard_0_is_reached_where_it_answers():
    """An address of a host may be nobody's elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first = Node.here(0, 2, 1, ["127.0.0.2", "127.0.0.1"], listening)
        stop = threading.Event()

        def answer():
            while not stop.wait(0.02):
                meet_nodes.answer(listening, first.token)

        thread = threading.Thread(target=answer)
        thread.start()
        met = meet_nodes.reach(first)
        stop.set()
        thread.join()
    assert met == meet_nodes.Peers("127.0.0.1", first.port, "127.0.0.1", first.secret)


def test_a_listener_that_is_not_shard_0_is_passed_over(monkeypatch):
    monkeypatch.setattr(meet_nodes, "_PROBE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as wrong:

        def answer():
            with wrong.accept()[0] as connection:
                connection.sendall(b"x" * 32)

        threading.Thread(target=answer, daemon=True).start()
        for other in (silent, wrong):
            first = Node.here(0, 2, 1, ["127.0.0.1"], other)
            assert meet_nodes.reach(first) is None


def test_a_missing_shard_is_named_on_every_host(place):
    commands = [Command(place, shard, 4, timeout_s=1.0) for shard in (0, 2)]
    for error, shard in zip(heard(*commands), (0, 2), strict=True):
        assert error.startswith(f"shard {shard} of 4 on {HOST}: shard 1, shard 3 did not come within 1 s to ")
        assert f"There are: shard 0: {HOST} (process {os.getpid()}, since 20" in error
        assert "each with its own --shard-id, all with the same --run-id" in error
    assert place[1]() == []


def test_shard_0_is_missing(place):
    (error,) = heard(Command(place, 1, 2, timeout_s=0.5))
    assert "shard 0 did not come within 0.5 s" in error
    assert place[1]() == []


def test_shard_0_that_cannot_be_reached_is_named(place):
    commands = [Command(place, shard, timeout_s=1.5, addresses=["192.0.2.7"][: 1 - shard]) for shard in (0, 1)]
    # A host without a route says so at once, one with a route that leads nowhere after a while.
    for error in heard(*commands):
        assert "a connection from shard 1 to shard 0 did not come within 1.5 s" in error
        assert re.search(r"Shard 0 listens at port \d+ of 192\.0\.2\.7: is a firewall", error)
        assert "--network-interface" in error
    assert place[1]() == []


def test_two_with_one_number_are_told_so_and_so_are_the_others(place):
    commands = [Command(place, shard, 3) for shard in (0, 1)]
    time.sleep(0.3)
    commands.append(Command(place, 1, 3))
    for error in heard(*commands):
        assert "--shard-id 1 is there twice: shard 1: " in error
    assert place[1]() == []


@pytest.mark.parametrize(("num_shards", "num_gpus"), [(3, 1), (2, 4)])
def test_different_numbers_are_told_to_all(place, num_shards, num_gpus):
    first = Command(place, 0, 2, 1)
    time.sleep(0.3)
    for error in heard(first, Command(place, 1, num_shards, num_gpus)):
        assert "the hosts disagree: shard 0: " in error
        assert "says 2 shards with 1 processes each" in error
        assert f"says {num_shards} with {num_gpus}" in error
    assert place[1]() == []


def test_a_run_id_in_use_is_refused_and_the_running_one_left_alone(place):
    running = [Command(place, shard) for shard in range(2)]
    assert heard(*running) == ["", ""]
    before = place[1]()
    for error in heard(*(Command(place, shard) for shard in range(2))):
        assert "the run id is in use, says" in error
        assert f"shard 1: {HOST} (process {os.getpid()}" in error
        assert "another --run-id" in error
    assert place[1]() == before
    running[0].leave()
    assert "the run id is in use" in heard(Command(place, 0))[0]
    running[1].leave()
    assert place[1]() == []


def test_a_killed_run_is_named_with_what_removes_it(place, tmp_path):
    left_by_a_killed_one(place, job="", shard_1="", outcome="all here")
    before = place[1]()
    for error in heard(*(Command(place, shard) for shard in range(2))):
        assert "shard 1: gone (process 77, since 2026-01-02 03:04:05)" in error
        assert "they were killed" in error
        assert "redis-cli -h 127.0.0.1" in error or f"`rm -r {tmp_path}/partial-fc-run`" in error
    assert place[1]() == before


def test_one_killed_while_it_waited_is_named(place):
    left_by_a_killed_one(place, job="", shard_1="")
    for error in heard(*(Command(place, shard) for shard in range(2))):
        assert "--shard-id 1 is there twice: shard 1: gone (process 77" in error
        assert "it was killed; " in error
    assert "was tried and failed (--shard-id 1 is there twice" in heard(Command(place, 0))[0]


def test_who_is_stopped_while_waiting_tells_the_others(place):
    waiting = Command(place, 0)
    store = place[0]()
    me = Node.here(1, 2, 1, [], None)
    with pytest.raises(SystemExit), meet_nodes._Meeting(store, me, None, 1.0).errors():
        raise SystemExit(143)
    assert f"shard 1: {HOST}" in heard(waiting)[0]
    assert "was stopped while the others waited" in waiting.error
    assert place[1]() == []
    store.close()


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[" * 5000,
        "[1, 2]",
        '{"shard_id": 1}',
        json.dumps({**vars(Node.here(1, 2, 1, [], None)), "port": 65536}),
    ],
)
def test_what_a_stranger_wrote_is_an_error(place, text):
    store = place[0]()
    store.set("job", text)
    (error,) = heard(Command(place, 0))
    assert "job holds" in error
    assert "which no host of a run has written" in error
    store.delete_key("job")
    store.close()


def test_an_outcome_of_a_strangers_is_an_error(place):
    """All here, before this host has found shard 0."""
    command = Command(place, 1)
    store = place[0]()
    while not store.check(["shard 1"]):
        time.sleep(0.01)
    store.set("outcome", "all here")
    assert "this host has not found shard 0" in heard(command)[0]
    store.close()


def test_addresses_that_are_none_are_passed_over():
    strange = ["", "." * 300, "a" * 70 + ".example", "\x00", "-1"]
    assert meet_nodes.reach(Node(0, 2, 1, "h", 1, "", "t", "s", strange, 1)) is None


def test_a_strangers_text_does_not_reach_the_terminal_as_it_is(place):
    store = place[0]()
    store.set("outcome", b"\x1b[31mred\r\n\xff")
    error = heard(Command(place, 0))[0]
    assert r"\x1b[31mred\r\n" in error
    assert error.isprintable()
    store.close()


def test_a_server_that_fails_while_the_hosts_gather_is_named():
    with redis_server() as port, ExitStack() as stack:
        commands = [Command((lambda: stores.open_redis("127.0.0.1", port, "run", 5), None), 1)]
        time.sleep(0.5)
        stack.close()
    (error,) = heard(*commands)
    assert f"shard 1 of 2 on {HOST}: Redis at 127.0.0.1:{port}, key partial-fc:run failed while the hosts" in error
