"""`make bench-gpu`: the last layer beside others. Speed needs a GPU; that each side trains is seen without one."""

import pytest

from benchmarks import gpu_versus
from benchmarks.gpu_versus import VersusOptions, versus


def test_every_side_trains_or_says_why_not(capsys):
    options = VersusOptions(classes=50, batch=8, dims=(16,), rounds=1, device="cpu")
    lines = versus(options)
    said = capsys.readouterr().out
    assert [line["side"].split()[0] for line in lines] == [
        "PartialFC", "F.linear,", "F.linear_cross_entropy,", "F.linear_cross_entropy,", "QuACK", "Liger",
    ]  # fmt: skip
    for line in lines:
        assert line["operands"] == line["storage"] == "fp32"
        assert line["side"] in said
        assert ("step_ms" in line) != ("pip install" in line.get("problem", "")), line
    assert all("step_ms" in line for line in lines[:4])

    sides = gpu_versus._sides(options, 16)[:4]
    first = [side.step().item() for side in sides]
    for _ in range(30):
        last = [side.step().item() for side in sides]
    assert first[1:] == pytest.approx([first[1]] * 3, rel=1e-5), "one loss: written out, as a whole, in chunks"
    assert all(after < before for before, after in zip(first, last, strict=True))
