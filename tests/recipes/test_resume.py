"""Runs that are continued by another number of processes."""

import shlex
import sys

import pytest

from tests.recipes.conftest import SMALL, losses, run


@pytest.mark.parametrize(
    ("flags_of_run", "num_steps", "equal_to"),
    [
        ("--precision fp64 --optimizer adamw --lr 0.003", 9, 1e-9),
        # Rounding differs with the number of processes; some more steps, and training has magnified it beyond this.
        ("--precision fp32 --optimizer sgd --lr 0.01", 8, 1e-5),
    ],
    ids=["fp64", "fp32"],
)
def test_one_process_then_eight_then_three_give_the_curve_of_one(
    glyphs, tmp_path, flags_of_run, num_steps, equal_to
):
    """In the midst of an epoch, with sampled negatives and the optimiser's state, the same images in each step."""

    def train(root, num_processes: int, batch_size: int, max_steps: int) -> str:
        torchrun = ["torchrun", "--standalone", f"--nproc_per_node={num_processes}"]
        flags = (
            f"--dataset glyphs --rec {glyphs} --val-targets --sync-bn --sample-rate 0.5 --lr-scheduler constant "
            f"{flags_of_run} --batch-size {batch_size} --max-steps {max_steps} --check-data off"
        )
        launched = [*torchrun, "train.py"] if num_processes > 1 else [sys.executable, "train.py"]
        return run([*launched, "face", "--models-root", str(root), *SMALL, *shlex.split(flags)])

    train(tmp_path / "whole", 1, 24, num_steps)
    parts = tmp_path / "parts"
    train(parts, 1, 24, 3)
    for num_processes, batch_size, first, last in ((8, 3, 3, 6), (3, 8, 6, num_steps)):
        assert f"step-{first:08d}" in train(parts, num_processes, batch_size, last)
    whole, continued = losses(tmp_path / "whole"), losses(parts)
    assert len(whole) == len(continued) == num_steps
    assert whole[:3] == continued[:3]
    assert max(abs(a - b) / a for a, b in zip(whole, continued, strict=True)) < equal_to
