"""The elastic protocol under schedules that no test with real processes would meet, and that the simulation sees what
is wrong.

A failure names its seed: `python -m tests.simulation --seed N` shows all that happens in it.
"""

import dataclasses

import pytest

pytest.importorskip("horovod.torch")

from tests.simulation.mutations import MUTATIONS  # noqa: E402
from tests.simulation.simulation import Plan, simulate  # noqa: E402

# Seeds whose schedule shows a mutation.
_SHOWS = {
    "a commit counts when it is begun": 50,
    "the shares of others count before they have come": 38,
    "the step is not taken back": 9,
    "images that were lost are not seen again": 2,
    "a checkpoint goes before a newer commit": 12,
    "ranks leave without a commit": 8,
    "the peer is on the same host": 52,
    "nobody waits for the others of a new world": 1,
    "who was given up believes that it was not": 2,
    "a checkpoint is marked when one rank has written": 2,
    "checksums are not compared": 122,
}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 121, 20))
def test_whatever_befalls_the_hosts_each_step_is_made_once_and_the_run_comes_to_its_end(first):
    for seed in range(first, first + 20):
        problem = simulate(Plan.of(seed)).problem
        assert problem is None, f"python -m tests.simulation --seed {seed}: {problem!r}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_made_by_hand_is_seen(name):
    assert simulate(Plan.of(_SHOWS[name]), more=[MUTATIONS[name]]).problem is not None


def test_a_seed_says_all():
    traces: list[list[str]] = [[], []]
    for trace in traces:
        simulate(Plan.of(38), trace.append)
    assert len(traces[0]) > 100
    assert traces[0] == traces[1]


def test_answers_of_the_world_before_are_not_believed():
    told: list[str] = []
    outcome = simulate(dataclasses.replace(Plan.of(24), stale=0.5), told.append)
    assert outcome.problem is None
    assert any("a stale answer" in line for line in told)
