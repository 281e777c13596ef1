"""The elastic protocol under schedules that no test with real processes would meet, and that the simulation sees what
is wrong.

A failure names its seed: `python -m tests.simulation --seed N` shows all that happens in it.
"""

import dataclasses
import gc
import threading
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from partial_fc.checkpoint import saver
from partial_fc.checkpoint.lock import FolderLock
from partial_fc.checkpoint.peer import commits
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.comm.elastic import membership
from partial_fc.train import resume
from tests.simulation.product import Replacement
from tests.simulation.simulation import Plan, simulate
from tests.waiting import until

_begin, _resume, _poll = commits.PeerCopies.begin, resume.resume, saver.Saver.poll


@pytest.fixture(scope="module", autouse=True)
def no_real_lock_is_refreshed() -> None:
    """Locks that other tests of this process left: their threads would come into the simulated files, and its time."""
    for each in gc.get_objects():
        if type(each) is FolderLock:
            each.stop()
    until(lambda: not any(thread.name == "owner" for thread in threading.enumerate()))


def _counted_at_once(copies: Any, *given: Any) -> None:
    _begin(copies, *given)
    copies._process.commits = [copies._commit]


def _step_stays(*given: Any, **more: Any) -> Any:
    start = _resume(*given, **more)
    return dataclasses.replace(start, step=max(start.step, membership.member().furthest_step))


# Faults made by hand in the product (where, which name, what it means then), and the seed from which on schedules are
# tried: that one shows the fault, until the product waits elsewhere.
MUTATIONS: dict[str, tuple[Replacement, int]] = {
    "a commit counts when it is begun": ((commits.PeerCopies, "begin", _counted_at_once), 50),
    "the step is not taken back": ((resume, "resume", _step_stays), 10),
    "nobody waits for the others of a new world": ((membership.Barrier, "wait", lambda *given: ""), 3),
    "a checkpoint is marked when one rank has written": (
        (saver.Saver, "poll", lambda here, any_busy, any_failed: _poll(here, here.busy, any_failed)),
        2,
    ),
    "checksums are not compared": ((Checkpoint, "check", lambda found, path: None), 13),
}


@pytest.mark.long
@pytest.mark.parametrize("first", [1, *range(21, 121, 20)])
def test_whatever_befalls_the_hosts_each_step_is_made_once_and_the_run_comes_to_its_end(first):
    for seed in range(first, first + 20):
        problem = simulate(Plan.of(seed)).problem
        assert problem is None, f"python -m tests.simulation --seed {seed}: {problem!r}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_made_by_hand_is_seen(name):
    mutation, first = MUTATIONS[name]
    assert any(simulate(Plan.of(seed), more=[mutation]).problem for seed in range(first, first + 100))


# The first two are faults of horovodrun's driver, which waited for ever (patches/horovod/elastic-driver.patch,
# tests/unit/comm/test_horovodrun.py).
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(5336, id="a process ends while the driver waits in vain for hosts"),
        pytest.param(20134, id="no other host is left when one whose process failed is back"),
        pytest.param(50130, id="a rank is lost while a commit of two is loaded, and only the other one is left"),
    ],
)
def test_schedules_that_were_found(seed):
    assert simulate(Plan.of(seed)).problem is None


def test_a_seed_says_all():
    traces: list[list[str]] = [[], []]
    for trace in traces:
        simulate(Plan.of(38), trace.append)
    assert len(traces[0]) > 100
    assert traces[0] == traces[1]


def test_answers_of_the_world_before_are_not_believed():
    told: list[str] = []
    outcome = simulate(dataclasses.replace(Plan.of(1), stale=0.5), told.append)
    assert outcome.problem is None
    assert any("a stale answer" in line for line in told)
