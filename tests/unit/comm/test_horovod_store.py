"""The store of horovodrun, as patches/horovod/signed-store.patch changes it: requests without a signature are refused
before their bodies, which released Horovod unpickles, are read (CVE-2024-10190). tests/cluster: a whole elastic job."""

import http.client
import json
import os
import socket
from unittest.mock import Mock

import psutil
import pytest

from partial_fc import signature
from partial_fc.comm.elastic.store import request
from partial_fc.signature import HEADER, TOKEN, WINDOW
from tests.cluster.stranger import exploit, put_exploit

pytest.importorskip("horovod.runner")
from horovod.runner.common.util import codec, env
from horovod.runner.elastic import worker
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


def send(port: int, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, body, headers)
    return connection.getresponse().status


def test_the_exploit_is_one(tmp_path):
    codec.loads_base64(exploit(tmp_path / "executed"))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("headers", [{}, {HEADER: ""}, {HEADER: "0" * 64}, {HEADER: "a 1 b c"}, {HEADER: "\xe9"}])
def test_a_stranger_is_refused_and_nothing_of_his_is_executed(port, driver, tmp_path, headers):
    assert put_exploit("127.0.0.1", port, tmp_path / "executed", headers) == 403
    assert not (tmp_path / "executed").exists()
    for method in ("GET", "HEAD", "DELETE"):
        assert send(port, method, "/rank_and_size/a:0", None, headers) == 403


def test_who_knows_the_token_is_served(port, driver):
    assert len(os.environ[TOKEN]) == 64
    put_data_into_kvstore("127.0.0.1", port, "scope", "pickled", 5)
    assert read_data_from_kvstore("127.0.0.1", port, "scope", "pickled") == 5
    assert request(("127.0.0.1", port), "PUT", "/scope/name", b"x")[0] == 200
    assert request(("127.0.0.1", port), "GET", "/scope/name", None) == (200, b"x")
    assert request(("127.0.0.1", port), "DELETE", "/scope/name", None)[0] == 200
    assert request(("127.0.0.1", port), "GET", "/scope/name", None)[0] == 404


def test_who_reads_a_request_off_the_network_cannot_use_it(port):
    """Neither again, nor for another method, path, body or server. The token is not in it."""
    at = f"http://127.0.0.1:{port}"
    headers = signature.headers("PUT", f"{at}/scope/name", b"x")
    assert os.environ[TOKEN] not in headers[HEADER]
    assert send(port, "PUT", "/scope/other", b"x", headers) == 403
    assert send(port, "DELETE", "/scope/name", b"x", headers) == 403
    elsewhere = signature.headers("PUT", "http://127.0.0.1:9/scope/name", b"x")
    assert send(port, "PUT", "/scope/name", b"x", elsewhere) == 403
    assert send(port, "PUT", "/scope/name", b"x", headers) == 200
    assert send(port, "PUT", "/scope/name", b"x", headers) == 403
    headers = signature.headers("PUT", f"{at}/scope/name", b"x")
    assert send(port, "PUT", "/scope/name", b"y", headers) == 403
    assert request(("127.0.0.1", port), "GET", "/scope/name", None) == (200, b"x")


def test_requests_may_overtake_each_other_but_come_once():
    received: set[int] = set()
    for number in range(2 * WINDOW, 4 * WINDOW, 2):
        assert signature._is_new(received, number)
    assert signature._is_new(received, 4 * WINDOW - 5)
    for number in (4 * WINDOW - 5, 4 * WINDOW - 2, 1, 2 * WINDOW + 1, 3 * WINDOW - 2):
        assert not signature._is_new(received, number)
    for number in range(4 * WINDOW, 10 * WINDOW):
        assert signature._is_new(received, number)
    assert len(received) <= 2 * WINDOW + 1


def test_a_pickle_of_one_who_knows_the_token_is_not_executed_by_the_elastic_driver(port, driver, tmp_path, capfd):
    with pytest.raises((OSError, http.client.HTTPException)):
        request(("127.0.0.1", port), "PUT", "/worker_addresses/a:0", exploit(tmp_path / "executed"))
    assert not (tmp_path / "executed").exists()
    assert driver.workers == {}


def test_a_process_tells_where_it_listens_and_its_key_is_not_sent(port, driver):
    manager = worker.WorkerNotificationManager()
    manager.init("127.0.0.1", port, "lo", "a", 0)
    try:
        ((place, (addresses, key)),) = driver.workers.items()
        assert place == ("a", 0)
        _, stored = request(("127.0.0.1", port), "GET", "/worker_addresses/a:0", None)
        assert json.loads(stored) == {nic: [list(at) for at in listed] for nic, listed in addresses.items()}
        told = []
        manager.register_listener(Mock(on_hosts_updated=lambda *news: told.append(news)))
        worker.WorkerNotificationClient(addresses, key, 0).notify_hosts_updated(7, 1)
        assert told == [(7, 1)]
    finally:
        manager._service.shutdown()


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


def test_the_token_is_on_no_command_line():
    assert not env.is_exportable(TOKEN)


def test_ssh_checks_the_keys_of_hosts_and_asks_nobody():
    from horovod.runner.util.remote import SSH_COMMAND_PREFIX

    assert SSH_COMMAND_PREFIX == "ssh -o BatchMode=yes"
