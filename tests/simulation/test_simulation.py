"""The elastic protocol under schedules that no test with real processes would meet, and that the simulation sees what
is wrong.

A failure names its seed: `python -m tests.simulation --seed N` shows all that happens in it.
"""

import dataclasses

import pytest

pytest.importorskip("horovod.torch")

from tests.simulation.mutations import MUTATIONS
from tests.simulation.simulation import Plan, simulate

# From which seed on schedules are tried: that one shows the mutation, until the product waits elsewhere.
_SHOWS = {
    "each world counts as the first": 64,
    "a commit counts when it is begun": 50,
    "what is kept for others counts before it came": 26,
    "the step is not taken back": 10,
    "images that were lost are not seen again": 1,
    "a checkpoint goes before a newer commit": 22,
    "ranks leave without a commit": 11,
    "the peer is on the same host": 11,
    "nobody waits for the others of a new world": 3,
    "a checkpoint is marked when one rank has written": 2,
    "checksums are not compared": 13,
}


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 21, *(pytest.param(seed, marks=pytest.mark.long) for seed in (41, 61, 81, 101))])
def test_whatever_befalls_the_hosts_each_step_is_made_once_and_the_run_comes_to_its_end(first):
    for seed in range(first, first + 20):
        problem = simulate(Plan.of(seed)).problem
        assert problem is None, f"python -m tests.simulation --seed {seed}: {problem!r}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_made_by_hand_is_seen(name):
    seeds = range(_SHOWS[name], _SHOWS[name] + 100)
    assert any(simulate(Plan.of(seed), more=MUTATIONS[name]).problem for seed in seeds)


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
