"""A head of `python -m benchmarks.head` takes the memory that `partial-fc plan` says."""

import pytest

from benchmarks.head import measure
from benchmarks.plan_memory import CASES, planned_bytes


@pytest.mark.long
def test_a_head_takes_the_memory_that_is_planned():
    """(All cases: python -m benchmarks.plan_memory.)"""
    assert measure(CASES[0])["added_bytes"] == pytest.approx(planned_bytes(CASES[0]), rel=0.25)
