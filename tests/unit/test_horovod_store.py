"""The store of horovodrun, as scripts/build_horovod.sh changes it: whoever does not know its token is refused before
what he sent is read, which released Horovod unpickles (CVE-2024-10190). tests/cluster has a whole elastic job."""

import http.client
import os
import socket

import psutil
import pytest

from partial_fc.comm.elastic.store import TOKEN, TOKEN_HEADER, request
from tests.cluster.stranger import exploit, put_exploit

pytest.importorskip("horovod.runner")
from horovod.runner.common.util import codec, env, secret
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
from horovod.runner.http.http_server import KVStoreServer, RendezvousServer


class Driver:
    """Stands for horovodrun's elastic one, and keeps what it was told."""

    def __init__(self):
        self.workers = {}

    def register_worker_server(self, host, local_rank, addresses, key):
        self.workers[host, local_rank] = addresses, key


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    return Driver()


@pytest.fixture
def port(driver):
    """Where an elastic driver's store listens on 127.0.0.1."""
    server = RendezvousServer()
    yield server.start(create_rendezvous_handler(driver), "127.0.0.1")
    server.stop()
    server._httpd.server_close()


def test_the_exploit_is_one(tmp_path):
    codec.loads_base64(exploit(tmp_path / "executed"))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("headers", [{}, {TOKEN_HEADER: ""}, {TOKEN_HEADER: "0" * 64}, {TOKEN_HEADER: "\xe9"}])
def test_a_stranger_is_refused_and_nothing_of_his_is_executed(port, driver, tmp_path, headers):
    assert put_exploit("127.0.0.1", port, tmp_path / "executed", headers) == 403
    assert not (tmp_path / "executed").exists()
    for method in ("GET", "HEAD", "DELETE"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, "/rank_and_size/a:0", None, headers)
        assert connection.getresponse().status == 403


def test_who_knows_the_token_is_served(port, driver):
    assert len(os.environ[TOKEN]) == 64
    put_data_into_kvstore("127.0.0.1", port, "worker_addresses", "a:0", ({"lo": []}, b"key"))
    assert driver.workers == {("a", 0): ({"lo": []}, b"key")}
    assert request(("127.0.0.1", port), "PUT", "/scope/name", b"x")[0] == 200
    assert request(("127.0.0.1", port), "GET", "/scope/name", None) == (200, b"x")
    assert request(("127.0.0.1", port), "DELETE", "/scope/name", None)[0] == 200
    assert request(("127.0.0.1", port), "GET", "/scope/name", None)[0] == 404


def test_it_listens_on_the_address_it_is_given(port):
    entries = [entry for found in psutil.net_if_addrs().values() for entry in found]
    for address in {e.address for e in entries if e.family == socket.AF_INET} - {"127.0.0.1"}:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, port), timeout=5)


def test_the_store_of_a_function_that_is_run_is_closed_too(driver, tmp_path):
    """horovod.run(function): CVE-2026-31234."""
    server = KVStoreServer(verbose=0)
    port = server.start_server("127.0.0.1")
    try:
        put_data_into_kvstore("127.0.0.1", port, "runfunc", "func", 5)
        assert put_exploit("127.0.0.1", port, tmp_path / "executed") == 403
        assert read_data_from_kvstore("127.0.0.1", port, "runfunc", "func") == 5
    finally:
        server.shutdown_server()


def test_the_token_is_passed_on_under_our_name_but_on_no_command_line():
    assert (secret.STORE_TOKEN, secret.STORE_HEADER) == (TOKEN, TOKEN_HEADER)
    assert not env.is_exportable(TOKEN)


def test_ssh_checks_the_keys_of_hosts_and_asks_nobody():
    from horovod.runner.util.remote import SSH_COMMAND_PREFIX

    assert SSH_COMMAND_PREFIX == "ssh -o BatchMode=yes"
