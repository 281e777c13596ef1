"""What strangers get where ranks meet and where rank 0 keeps its board: no connection, or none for long, and no word in
the log. (Over a network: tests/cluster/test_strangers.py.)"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from partial_fc.comm import StartError, rendezvous
from partial_fc.comm.auth import admission, handshake
from partial_fc.comm.auth.limiter import HELLO_BYTES, HELLO_S, end
from partial_fc.comm.launch import Launch
from partial_fc.comm.watch.status_server import Board
from tests.cluster.stranger import HOSTILE
from tests.recipes.hang import free_port


def other_address() -> str:
    """One of this host's addresses that is not its loopback's, as a stranger's stand-in."""
    found = [a for a in admission.own_addresses() if ":" not in a and not a.startswith("127.")]
    return found[0] if found else pytest.skip("this host has no other address than the loopback's")


def connects(server: socket.socket, source: str, timeout_s: float = 0.3) -> bool:
    """Whether that source gets a connection; the kernel drops what is not admitted without a word."""
    port = server.getsockname()[1]
    try:
        socket.create_connection((source, port), timeout_s, source_address=(source, 0)).close()
    except TimeoutError:
        return False
    return True


# ---- the kernel's filter


def test_a_socket_answers_the_hosts_it_was_told_and_its_own_loopback():
    outside = other_address()
    if error := admission.filters_error():
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert not admission.admit_only([server.fileno()], [outside])
        pytest.skip(f"this user's sockets have no filters: {error}")
    before = admission.listening()
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        (descriptor,) = admission.opened_since(before)
        assert descriptor == server.fileno()
        assert connects(server, outside)
        assert admission.admit_only([descriptor], ["192.0.2.77", "2001:db8::77"])
        assert not connects(server, outside)
        assert connects(server, "127.0.0.1")
        assert connects(server, "::1")
        assert admission.admit_only([descriptor], ["2001:db8::77", outside])
        assert connects(server, outside)


def test_which_addresses_pass_is_up_to_the_last_bit():
    """Each of many, and none that differs in one bit, as the kernel's virtual machine would run the program."""
    known = [ipaddress.ip_address(f"10.0.{i}.7") for i in range(200)]
    known += [ipaddress.ip_address(f"2001:db8::{i:x}:7") for i in range(200)]
    program = admission._program(known)
    assert len(program) <= 4096
    for address in (known[0], known[199], known[200], known[-1]):
        assert passes(program, address)
        for bit in range(address.max_prefixlen):
            other = type(address)(int(address) ^ 1 << bit)
            assert passes(program, other) == (other in known)
    assert passes(program, ipaddress.ip_address("127.0.1.1"))
    assert not passes(program, ipaddress.ip_address("::2"))


def passes(program: list[admission.Instruction], source: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    words = {0xFFFFF000: 0x0800 if source.version == 4 else 0x86DD}
    at = 0xFFF00000 + (12 if source.version == 4 else 8)
    words |= {at + i: int.from_bytes(source.packed[i : i + 4]) for i in range(0, len(source.packed), 4)}
    here, held = 0, 0
    while True:
        what, skip_if, skip_else, number = program[here]
        here += 1
        match what:
            case 0x20:
                held = words[number]
            case 0x54:
                held &= number
            case 0x05:
                here += number
            case 0x15:
                here += skip_if if held == number else skip_else
            case 0x06:
                return number != 0


def test_hosts_behind_address_translation_may_do_without(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv(admission.ADMIT, "any")
        assert not admission.admit_only([server.fileno()], [])
        monkeypatch.setenv(admission.ADMIT, "some")
        with pytest.raises(ValueError, match="PARTIAL_FC_ADMIT=some; expected hosts"):
            admission.admit_only([server.fileno()], [])


# ---- where the ranks meet


@pytest.fixture
def opened(monkeypatch):
    """A gate with the secret "right", and the store behind it, both on all addresses."""
    listening, store = socket.create_server(("", 0)), socket.create_server(("", 0))
    port = listening.getsockname()[1]
    made = handshake.Gate(listening, socket.socket(fileno=os.dup(store.fileno())), "right", 2)
    yield port, store
    made.close(["192.0.2.77"])
    store.close()


def test_who_knows_the_secret_is_let_in_and_nobody_else(opened):
    port, store = opened
    outside = other_address()
    assert not connects(store, outside)
    with pytest.raises(handshake.NotRank0, match="give all hosts the same --secret-file"):
        handshake.knock(outside, port, "wrong", 5.0)
    assert not connects(store, outside)
    assert handshake.knock(outside, port, "right", 5.0) == store.getsockname()[1]
    assert connects(store, outside)


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
                handshake.knock("127.0.0.1", listening.getsockname()[1], "right", 5.0)
            thread.join()


def test_what_others_write_into_the_store_reaches_no_terminal(monkeypatch):
    """torchrun's store is anybody's."""
    import torch.distributed as dist

    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(rendezvous, "_stores", {})
    monkeypatch.setattr(rendezvous, "_num_meetings", 0)
    monkeypatch.setattr(rendezvous, "_LINGER_S", 0.0)
    dist.PrefixStore("attempt 0, meeting 1", agent).set("verdict", "\x1b[31mred\nline")
    with pytest.raises(StartError) as error:
        rendezvous.meet(Launch("torch", 0, 2, 0, 1, "torchrun", "127.0.0.1", port), 5.0)
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


# ---- the status board


@pytest.fixture
def board(monkeypatch, caplog):
    """One of two ranks, in a thread; nothing may be logged."""
    monkeypatch.setattr(logging.getLogger("partial_fc"), "propagate", True)
    made = Board(2, one_host=True)
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
    connection.settimeout(HELLO_S + 20)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(100) == b""
    return True


def test_whatever_a_stranger_says_the_board_hangs_up(board):
    token = json.dumps(board.endpoint.token)
    nearly = [f'{{"hello": {token}{rest}'.encode() for rest in ("}\n", ', "state": {"rank": 7}}\n', ', "state": []}\n')]
    for said in (*HOSTILE, *nearly):
        with socket.create_connection(("127.0.0.1", board.endpoint.port), 5.0) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
            assert hangs_up(stranger)


def test_a_crowd_takes_no_place_from_a_rank(board):
    """Those who say nothing are more than the board lets wait; a rank that comes then is served, and they go."""
    crowd = [socket.create_connection(("127.0.0.1", board.endpoint.port), 5.0) for _ in range(100)]
    hello = {"hello": board.endpoint.token, "state": {"rank": 1}}
    with socket.create_connection(("127.0.0.1", board.endpoint.port), 5.0) as rank:
        rank.sendall(json.dumps(hello).encode() + b"\n")
        assert json.loads(rank.makefile().readline()) == {"welcome": board.endpoint.token}
        for one in crowd:
            assert hangs_up(one)
            one.close()
        # Who is known may say more than a stranger.
        rank.sendall(json.dumps({"state": {"rank": 1, "code": "x" * 20 * HELLO_BYTES}}).encode() + b"\n")
        until = time.monotonic() + 20
        while "code" not in (board._clients[1].newest or {}) and time.monotonic() < until:
            time.sleep(0.01)
        assert len(board._clients[1].newest["code"]) == 20 * HELLO_BYTES


def test_the_board_is_where_the_ranks_are_invited(monkeypatch):
    outside = other_address()
    name = next(name for name, address in admission_names().items() if address == outside)
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", name)
    made = Board(2, one_host=False)
    assert made.endpoint.addresses == [outside]
    assert made.socket.getsockname()[0] == outside
    made.socket.close()


def admission_names() -> dict[str, str]:
    from partial_fc.comm.launch.interface import addresses

    return addresses()


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
