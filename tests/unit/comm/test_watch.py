"""The words of a report from made-up states; the store with several ranks in one process. (Launches that really hang:
tests/recipes/launchers/test_hang_report.py.)"""

import threading
from collections.abc import Iterator

import pytest
import torch

from partial_fc import comm
from partial_fc.comm.watch import board
from partial_fc.comm.watch.board import Endpoint
from partial_fc.comm.watch.report import MAX_LINES, PeerState, RankState, report
from partial_fc.comm.watch.watchdog import Journal, Watch
from tests.waiting import free_port, until

HEAD = "collective head/sum has not finished after 600 s"


def waiting(rank: int) -> PeerState:
    state = RankState(rank, "gpu1", 100 + rank, "", 12, 40, "head/sum", "head/sum", 599.0, started={"head/sum": 12})
    return PeerState(rank, state, 0.1, answered=True)


def silent(rank: int) -> PeerState:
    return PeerState(rank, RankState(rank, "gpu9", 5, "", 11, 38, "backbone/gradient_2"), 597.0)


def killed(rank: int) -> PeerState:
    return PeerState(rank, RankState(rank, "gpu3", 7, "", 12, 39, "head/max"), 30.0, has_ended=True)


def told(*peers: PeerState) -> str:
    return report(HEAD, "head/sum", 12, peers)


def test_hang_tells_a_silent_rank_from_an_ended_one():
    goodbye = "its Python ended without closing the world; ValueError: key 17"
    left = PeerState(4, RankState(4, goodbye=goodbye), 20.0)
    text = told(waiting(0), silent(1), PeerState(2), killed(3), left)
    assert text.startswith(HEAD)
    assert "missing: rank 1 (host gpu9, process 5): no sign of life for 597 s" in text
    assert "unknown: rank 2: has never reached the store" in text
    assert "missing: rank 3 (host gpu3, process 7): no longer there" in text
    assert "step 12, last collective head/max, number 39" in text
    assert "missing: rank 4: left 20 s ago (its Python ended without closing the world; ValueError: key 17)" in text
    assert "what to check: the output of ranks 3-4" in text


def test_hang_with_all_ranks_there_points_at_the_network():
    text = told(*map(waiting, range(3)))
    assert "missing" not in text
    assert "waiting in it: ranks 0-2" in text
    assert "every rank has called it" in text


def test_a_thousand_missing_ranks_do_not_make_a_thousand_lines():
    text = told(waiting(0), *map(silent, range(1, 1000)))
    assert f"... and {999 - MAX_LINES} more ranks" in text
    assert len(text.splitlines()) == MAX_LINES + 4
    assert "network of ranks 1-999" in text


def test_who_ended_first_is_told_from_those_whose_collective_failed_with_it():
    failed_too = PeerState(1, RankState(1, "gpu1", 5, failed="head/sum", goodbye="CollectiveError"))
    text = told(failed_too, killed(2))
    assert (
        "failed too: rank 1 (host gpu1, process 5): its backend gave up collective head/sum, and it has ended" in text
    )
    assert "what to check: the output of rank 2;" in text


def test_a_store_that_does_not_answer_was_that_of_rank_0():
    assert "missing: rank 0, whose process" in report(HEAD, "head/sum", 12, None)


# ---- the store


def a_journal(rank: int, size: int) -> Journal:
    made = Journal(rank, size, "horovod")
    made.step = rank + 5
    return made


@pytest.fixture
def watches(monkeypatch) -> Iterator[list[Watch]]:
    """Ranks 0 to 2 of 4, of which the last never comes."""
    monkeypatch.setattr(board, "has_ended", lambda process: False)  # all are this one
    endpoint = Endpoint.served(4, one_host=True)
    made = [Watch(a_journal(rank, 4), 600.0, endpoint) for rank in range(3)]
    yield made
    for watch in reversed(made):
        watch.close()


def test_every_rank_is_asked_for_its_place(watches):
    watches[1]._journal.begin("t/a")
    watches[1]._journal.in_flight.clear()
    watches[2]._journal.begin("t/b")
    watches[0]._journal.begin("t/a")
    seen = watches[0].peer_states()
    assert [s.answered for s in seen] == [True, True, True, False]
    states = [s.state for s in seen[:3]]
    assert [state.step for state in states] == [5, 6, 7]
    assert [state.started for state in states] == [{"t/a": 1}, {"t/a": 1}, {"t/b": 1}]
    assert [state.waits_for for state in states] == ["t/a", "", "t/b"]
    assert seen[3].state is None


def test_who_left_who_was_killed_and_who_is_silent_is_told(watches, monkeypatch):
    watches[2].close("it failed; ValueError: key 17")
    monkeypatch.setattr(board, "ANSWER_S", 0.6)
    monkeypatch.setattr(watches[1], "_state", threading.Event().wait)  # for ever
    seen = watches[0].peer_states()
    assert [s.answered for s in seen[:2]] == [True, False]
    assert seen[2].state.goodbye == "it failed; ValueError: key 17"
    monkeypatch.setattr(board, "has_ended", lambda process: True)
    assert watches[0].peer_states()[1].has_ended


def test_the_first_to_report_a_hang_is_the_only_one(watches):
    boards = [watch._connect() for watch in watches]
    assert [made.claim_hang() for made in boards] == [True, False, False]
    until(lambda: all(watch._ending_since for watch in watches))


def test_a_store_elsewhere_that_answers_at_the_same_port_is_another_one(watches):
    endpoint = watches[0]._endpoint
    assert endpoint.connect() is not None
    assert Endpoint(endpoint.addresses, endpoint.port, "another world").connect() is None
    assert Endpoint(["127.0.0.1"], free_port(), endpoint.world).connect() is None


def test_a_watch_that_does_not_start_is_an_error(monkeypatch):
    def fails(_):
        raise RuntimeError("can't start new thread")

    endpoint = Endpoint.served(2, one_host=True)
    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(comm.StartError, match=r"watch over collectives does not start: .*can't start new thread"):
        Watch(a_journal(0, 2), 600.0, endpoint)


def test_time_counts_from_the_second_look_and_a_gpu_that_is_done_waits_no_longer(watches):
    journal = watches[0]._journal
    call, on_gpu = journal.begin("t/a"), journal.begin("t/on_gpu")
    call.waited_s = on_gpu.waited_s = -1.0
    ready = False
    on_gpu.done = lambda: ready
    for _ in range(3):
        watches[0]._count_waiting(10.0)
    assert call.waited_s >= 20.0
    assert on_gpu in journal.in_flight
    ready = True
    watches[0]._count_waiting(10.0)
    assert journal.in_flight == {call}


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(timeout_s):
    with pytest.raises(ValueError, match="timeout"):
        comm.SingleWorld().watch(timeout_s)


def test_what_the_backend_raises_is_told_with_name_step_and_rank(monkeypatch):
    world = comm.SingleWorld()
    world.step = 3

    def fails(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(world, "_all_reduce", lambda t, op, name: fails)
    with pytest.raises(comm.CollectiveError, match=r"t/a failed on rank 0, step 3, call 1.*closed by peer") as error:
        world.all_reduce(torch.ones(2), name="t/a")
    assert str(error.value.__cause__) == "Connection closed by peer"
    monkeypatch.setattr(world, "_all_gather", fails)
    with pytest.raises(comm.CollectiveError, match="t/b failed"):
        world.start_all_gather(torch.ones(2), name="t/b")
    assert not world.journal.in_flight
