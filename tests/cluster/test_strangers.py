"""Somebody on a third host throws what he has at every socket of a job that trains on two, and it trains on as if he
were not there. (A minute of it, and more of everything: `make torture`.)"""

import pytest

from tests.cluster.strangers_job import attack


@pytest.mark.long
def test_a_stranger_changes_nothing(hosts, env, tmp_path):
    attack(hosts, env, tmp_path, seconds=5.0, messages=1_000, connections=200).check()
