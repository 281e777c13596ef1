"""What strangers get where ranks meet and where rank 0 keeps its server: none of them stays connected for long or
writes a word into the log."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

import pytest

from partial_fc.comm import StartError
from partial_fc.comm.auth import handshake
from partial_fc.comm.auth.handshake import PRE_AUTH_S, end
from partial_fc.comm.launch import Launch, meet_ranks
from partial_fc.comm.watch.status_server import StatusServer
from tests.cluster.stranger import HOSTILE
from tests.waiting import free_port, until

# ---- where the ranks meet


def test_who_knows_the_secret_is_told_the_port_and_nobody_else():
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    rank_0 = handshake.Handshake(listening, 4711, "right", 2)
    with pytest.raises(handshake.NotRank0, match="give all hosts the same --secret-file"):
        handshake.connect("127.0.0.1", port, "wrong", 5.0)
    assert handshake.connect("127.0.0.1", port, "right", 5.0) == 4711
    rank_0.close()


def test_a_stranger_cannot_pass_for_rank_0():
    def answers(message: dict) -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(b'{"nonce": "1"}\n')
            lines.readline()
            connection.sendall(json.dumps(message).encode() + b"\n")

    for message, why in (
        ({"port": 1, "proof": "00"}, "does not know this run's secret"),
        ({"port": 1, "proof": "\ud800"}, "says something else"),
        ({"port": "\x1b[31m"}, "does not know this run's secret"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=answers, args=(message,))
            thread.start()
            with pytest.raises(handshake.NotRank0, match=why):
                handshake.connect("127.0.0.1", listening.getsockname()[1], "right", 5.0)
            thread.join()


def test_what_others_write_into_the_store_reaches_no_terminal(monkeypatch):
    """torchrun's store is anybody's."""
    import torch.distributed as dist

    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(meet_ranks, "_stores", {})
    monkeypatch.setattr(meet_ranks, "_num_meetings", 0)
    monkeypatch.setattr(meet_ranks, "_LINGER_S", 0.0)
    dist.PrefixStore("attempt 0, meeting 1", agent).set("outcome", "\x1b[31mred\nline")
    with pytest.raises(StartError) as error:
        meet_ranks.meet(Launch("torch", 0, 2, 0, 1, "torchrun", "127.0.0.1", port), 5.0)
    assert str(error.value).isprintable()
    assert r"\x1b[31mred\nline" in str(error.value)


def test_a_secret_is_of_a_file_that_is_its_owners_alone(tmp_path):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o640)
    with pytest.raises(ValueError, match="others than you may read"):
        handshake.read_secret(file)
    file.chmod(0o600)
    assert handshake.read_secret(file) == "0123456789abcdef"
    for wrong, words in ((b"short", "5 characters; expected 16"), (b"\xff" * 20, "ascii")):
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=words):
            handshake.read_secret(file)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "no", tmp_path / "fifo"):
        with pytest.raises(ValueError, match=f"--secret-file {path}"):
            handshake.read_secret(path)


# ---- the status server


@pytest.fixture
def server(caplog):
    """One of two ranks, in a thread; nothing may be logged."""
    made = StatusServer(2, one_host=True)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(made.serve(), loop).result()
    yield made
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    made.socket.close()
    end(loop)
    assert caplog.text == ""


def hangs_up(connection: socket.socket) -> bool:
    connection.settimeout(PRE_AUTH_S + 20)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(100) == b""
    return True


def test_whatever_a_stranger_says_the_board_hangs_up(server):
    token = json.dumps(server.endpoint.token)
    nearly = [f'{{"token": {token}{rest}'.encode() for rest in ("}\n", ', "state": {"rank": 7}}\n', ', "state": []}\n')]
    for said in (*HOSTILE, *nearly):
        with socket.create_connection(("127.0.0.1", server.endpoint.port), 5.0) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
            assert hangs_up(stranger)


def test_a_crowd_takes_no_place_from_a_rank(server):
    """Those who say nothing are more than the server lets wait; a rank that comes then is served, and they go."""
    crowd = [socket.create_connection(("127.0.0.1", server.endpoint.port), 5.0) for _ in range(100)]
    greeting = {"token": server.endpoint.token, "state": {"rank": 1}}
    with socket.create_connection(("127.0.0.1", server.endpoint.port), 5.0) as rank:
        rank.sendall(json.dumps(greeting).encode() + b"\n")
        assert json.loads(rank.makefile().readline()) == {"welcome": server.endpoint.token}
        for one in crowd:
            assert hangs_up(one)
            one.close()
        rank.sendall(json.dumps({"state": {"rank": 1, "code": "x" * 2000}}).encode() + b"\n")
        until(lambda: "code" in (server._clients[1].newest or {}))
        assert len(server._clients[1].newest["code"]) == 2000


# ---- our own secrets


def test_no_secret_of_ours_is_on_a_command_line():
    """The secret of a launch on one host, as other users of it see its processes."""
    words = "import os, pathlib; print(os.environ['PARTIAL_FC_SECRET'], pathlib.Path('/proc/self/cmdline').read_text())"
    script = (
        "import sys; from partial_fc.comm.launch import spawn;"
        f"sys.exit(spawn.run([sys.executable, '-c', {words!r}], nodes=1, gpus=2, nr=0, master_addr='127.0.0.1', "
        "master_port=None))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    told = [line.partition(" ") for line in done.stdout.splitlines()]
    assert len(told) == 2
    assert {len(secret) for secret, _, _ in told} == {64}
    assert all(secret not in line for secret, _, line in told)
