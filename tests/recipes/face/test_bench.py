"""`python -m benchmarks.head` runs its processes, and a head takes the memory that `partial-fc plan` says."""

import pytest

from benchmarks.head import HeadOptions, measure, report
from benchmarks.plan_memory import CASES, planned_bytes


@pytest.mark.long
def test_a_head_takes_the_memory_that_is_planned():
    """(All cases: python -m benchmarks.plan_memory.)"""
    assert measure(CASES[0])["added_bytes"] == pytest.approx(planned_bytes(CASES[0]), rel=0.25)


@pytest.mark.long
def test_two_sides_in_turn_say_what_they_compute_in():
    """The ratio is the other's time over ours."""
    small = HeadOptions(classes=1_000, batch=16, dim=32, steps=1, rounds=1, precision="fp32", num_processes=1)
    line = measure(HeadOptions(**{**vars(small), "versus": ("torch",), "versus_dtype": "bf16"}))
    other = line["others"]["torch"]
    assert (line["precision"], line["dtype"], line["state_dtype"]) == ("fp32", "fp32", "fp32")
    assert (other["precision"], other["dtype"], other["sum_dtype"]) == ("fp32", "bf16", "fp32")
    assert line["rows"] == 1000, "all of a process: of a sample the sides draw other numbers, too few here to compare"
    assert other["times_as_fast"] == pytest.approx(other["step_s"] / line["step_s"], abs=0.01)
    text = "\n".join(report(line))
    assert "torch (operands fp32, centres bf16)" in text


def test_what_the_head_refuses_in_a_process_is_told():
    with pytest.raises(ValueError, match=r"this head: .*triton"):
        measure(HeadOptions(classes=64, batch=2, dim=16, num_processes=1, impl="triton"))
