"""`python -m benchmarks.head` runs its processes, and a head takes the memory that `partial-fc plan` says."""

import pytest

from benchmarks.head import HeadOptions, measure
from benchmarks.plan_memory import CASES, planned_bytes


@pytest.mark.long
def test_a_head_takes_the_memory_that_is_planned():
    """(All cases: python -m benchmarks.plan_memory.)"""
    assert measure(CASES[0])["added_bytes"] == pytest.approx(planned_bytes(CASES[0]), rel=0.25)


def test_what_the_head_refuses_in_a_process_is_told():
    with pytest.raises(ValueError, match=r"this head: .*triton"):
        measure(HeadOptions(classes=64, batch=2, dim=16, num_processes=1, impl="triton"))
