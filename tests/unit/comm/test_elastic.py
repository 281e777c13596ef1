"""How processes find their places under horovodrun's elastic driver, of which a small double stands here."""

import http.client
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from partial_fc import signature
from partial_fc.comm import CollectiveError, elastic
from partial_fc.comm.elastic import Evicted, HostsChanged, Member, membership
from partial_fc.comm.elastic.store import Store, request
from partial_fc.comm.launch import restart_agent
from partial_fc.comm.launch.detect import StartError
from partial_fc.signature import HEADER, TOKEN


class Driver(ThreadingHTTPServer):
    """Keeps what is put, and answers the question for a place with `places` (by host), once it is `open`."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.kept: dict[str, bytes] = {}
        self.places: dict[str, str] = {}
        self.open = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def new_world(self, **places: str) -> None:
        self.kept.clear()
        self.places = places
        self.open.set()


class Handler(BaseHTTPRequestHandler):
    server: Driver

    def parse_request(self):
        return super().parse_request() and signature.is_right(self)

    def do_GET(self):
        _, scope, key = self.path.split("/")
        if scope == "rank_and_size":
            self.server.open.wait(20)
            return self.answer(self.server.places[key.partition(":")[0]].encode())
        return self.answer(self.server.kept.get(self.path))

    def do_PUT(self):
        self.server.kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b"")

    def answer(self, body: bytes | None) -> None:
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format, *args):
        pass


@pytest.fixture
def driver():
    made = Driver()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture(autouse=True)
def _place(monkeypatch):
    """`meet` writes these for Horovod's C++; horovodrun sets the token."""
    monkeypatch.setenv(TOKEN, "of this job")
    for name in membership._RANK_VARIABLES:
        monkeypatch.setenv(name, "0")


def member(driver, host: str, *place: int) -> Member:
    return Member(host, 0, place, Store(driver.server_address))


def meet_all(*members: Member, timeout_s: float = 10.0) -> None:
    with ThreadPoolExecutor(len(members)) as pool:
        for done in [pool.submit(m.rendezvous, timeout_s) for m in members]:
            done.result()


def test_those_that_are_left_meet_in_a_new_world(driver):
    first, second, third = (member(driver, host, rank, 3, 0, 1, rank, 3) for rank, host in enumerate("abc"))
    meet_all(first, second, third)
    second.hosts_changed.set()  # told before it asks: the answer knows of it
    threading.Timer(0.2, lambda: driver.new_world(b="0,2,0,1,0,2", c="1,2,0,1,1,2")).start()
    meet_all(second, third)
    assert (second.launch.rank, third.launch.rank, third.launch.size) == (0, 1, 2)
    assert not second.hosts_changed.is_set()
    # What Horovod's own code is answered, without asking the driver again; all else goes on to the driver.
    port = third.store.server_port
    driver.open.clear()
    assert request(("127.0.0.1", port), "GET", "/rank_and_size/c:0", None) == (200, b"1,2,0,1,1,2")
    request(("127.0.0.1", port), "PUT", "/global/1", b"x")
    assert driver.kept["/global/1"] == b"x"
    assert request(("127.0.0.1", port), "GET", "/global/2", None)[0] == 404


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_who_does_not_know_the_token_is_refused(driver, monkeypatch, method):
    """Another user of this host."""
    port = member(driver, "a", 0, 1, 0, 1, 0, 1).store.server_port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, "/global/1", b"x" if method == "PUT" else None, {HEADER: "a 1 b guess"})
    assert connection.getresponse().status == 403
    assert not driver.kept
    monkeypatch.delenv(TOKEN)
    with pytest.raises(StartError, match=r"CVE-2024-10190.*make setup"):
        member(driver, "a", 0, 1, 0, 1, 0, 1)


def test_who_does_not_come_is_asked_about(driver):
    """The first waits for the second in vain, and the driver then has one place only."""
    first = member(driver, "a", 0, 2, 0, 1, 0, 2)
    threading.Timer(0.6, lambda: driver.new_world(a="0,1,0,1,0,1")).start()
    first.rendezvous(0.2)
    assert first.launch.size == 1


@pytest.mark.parametrize("known", [False, True])
def test_nobody_waits_for_a_host_that_is_gone_meanwhile(driver, known):
    """known: told before the driver made this world."""
    first = member(driver, "a", 0, 2, 0, 1, 0, 2)
    if known:
        first.hosts_changed.set()
    threading.Timer(0.3, first.hosts_changed.set).start()
    expected = "not joined within" if known else "hosts were added or removed"
    assert expected in first._barrier.wait(1 if known else 20, 1)


def test_the_word_of_another_world_does_not_count(driver):
    """This process could not be reached for a while, and has a successor."""
    old = member(driver, "b", 1, 2, 0, 1, 1, 2)
    calling = threading.Timer(0.2, lambda: driver.kept.update({"/barrier/1": b"new", "/barrier/all": b"here"}))
    calling.start()
    assert old._barrier.wait(20, 1) == "rank 0 has answered in another world"
    assert driver.kept["/barrier/1"] == b"new"


def test_who_brings_something_else_than_those_that_are_known():
    assert elastic.mismatched_ranks("abbc", [False, True, True, False]) == [0, 3]
    assert elastic.mismatched_ranks("aa", [True, False]) == []
    assert elastic.mismatched_ranks("ab", [False, False]) == []


def test_a_process_without_a_place_is_removed(driver):
    only = member(driver, "a", 0, 1, 0, 1, 0, 1)
    only.rendezvous(5)
    driver.places = {"a": "-1,-1,-1,-1,-1,-1"}
    driver.open.set()
    with pytest.raises(Evicted, match="not part of the job"):
        only.rendezvous(5)


def test_a_process_that_was_given_up_does_not_ask_for_the_place_of_its_successor(driver):
    old = member(driver, "a", 0, 1, 0, 1, 0, 1)
    old.rendezvous(5)
    driver.new_world(a="0,1,0,1,0,1")  # without having been asked by it
    member(driver, "a", 0, 1, 0, 1, 0, 1).rendezvous(5)
    with pytest.raises(Evicted, match="continued without this process"):
        old.rendezvous(5)


@pytest.mark.parametrize("met", [True, False])
def test_who_is_started_in_the_place_of_a_killed_one_goes_on_for_it(driver, monkeypatch, met):
    """The driver does not know that another process speaks for the second host."""
    monkeypatch.setattr(restart_agent, "_page", mmap.mmap(-1, mmap.PAGESIZE))
    first, second = member(driver, "a", 0, 2, 0, 1, 0, 2), member(driver, "b", 1, 2, 0, 1, 1, 2)
    if met:
        meet_all(first, second)
        threading.Timer(0.2, lambda: driver.new_world(a="1,2,0,1,1,2", b="0,2,0,1,0,2")).start()
    second._hand_over(met)
    successor = member(driver, "b", 9, 9, 0, 1, 9, 9)  # as its environment says
    successor.take_place(restart_agent.handover())
    meet_all(first, successor)
    assert [m.launch.rank for m in (first, successor)] == ([1, 0] if met else [0, 1])
    assert (successor.name == second.name, successor.is_restart, driver.open.is_set()) == (met, False, met)


def test_a_driver_that_is_gone_is_an_error_with_what_to_do(driver):
    only = member(driver, "a", 0, 1, 0, 1, 0, 1)
    only.rendezvous(5)
    driver.shutdown()
    driver.server_close()
    with pytest.raises(StartError, match="newest checkpoint"):
        only.rendezvous(5)


@pytest.fixture
def left(driver, monkeypatch) -> list[str]:
    """Why the only member of an elastic job has left each of its worlds."""
    only, why_left = member(driver, "a", 0, 1, 0, 1, 0, 1), []
    monkeypatch.setattr(membership, "_member", only)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setattr(only, "shutdown", why_left.append)
    return why_left


def test_run_goes_on_until_training_is_done(left):
    tries = iter([HostsChanged("one has come"), None])

    def train() -> str:
        error = next(tries)
        if error is not None:
            raise error
        return "done"

    assert elastic.run(train) == "done"
    assert left == ["one has come"]


def test_a_world_that_never_works_is_given_up(left):
    """What fails in each new world is no lost rank."""

    def train() -> None:
        raise CollectiveError("collective t/x failed on rank 0: tensors of two shapes")

    with pytest.raises(CollectiveError, match="two shapes"):
        elastic.run(train)
    assert left == ["a rank was lost (collective t/x failed on rank 0)"] * membership.MAX_LOSSES_WITHOUT_PROGRESS


def test_steps_that_are_made_again_are_no_progress(left):
    """A loss that comes in the same step of every world."""

    def train() -> None:
        if len(left) > 20:
            return  # it would go on for ever
        for step in range(11, 15 if len(left) < 3 else 17):
            membership.member().step_done(step)
        raise CollectiveError("collective t/x failed on rank 0: tensors of two shapes")

    with pytest.raises(CollectiveError, match="two shapes"):
        elastic.run(train)
    assert len(left) == 3 + membership.MAX_LOSSES_WITHOUT_PROGRESS


def test_without_elastic_mode_training_runs_once(monkeypatch):
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    with pytest.raises(HostsChanged):
        elastic.run(lambda: (_ for _ in ()).throw(HostsChanged("x")))
