"""Runs that are continued by another number of processes."""

import shlex
import sys

from tests.recipes.conftest import SMALL, losses, run


def test_one_process_then_eight_then_three_give_the_curve_of_one(glyphs, tmp_path):
    """In the midst of an epoch, with sampled negatives and AdamW's state, the same images in each step; in fp64, where
    rounding does not hide it. (In fp32 the first losses after a change agree to 1e-6, and training magnifies that.)"""

    def train(root, num_processes: int, batch_size: int, max_steps: int) -> str:
        torchrun = ["torchrun", "--standalone", f"--nproc_per_node={num_processes}"]
        flags = (
            f"--dataset glyphs --rec {glyphs} --val-targets --sync-bn --sample-rate 0.5 --lr-scheduler constant "
            "--precision fp64 "
            f"--batch-size {batch_size} --max-steps {max_steps} --check-data off"
        )
        launched = [*torchrun, "train.py"] if num_processes > 1 else [sys.executable, "train.py"]
        return run([*launched, "face", "--models-root", str(root), *SMALL, *shlex.split(flags)])

    train(tmp_path / "whole", 1, 24, 9)
    parts = tmp_path / "parts"
    train(parts, 1, 24, 3)
    for num_processes, batch_size, max_steps in ((8, 3, 6), (3, 8, 9)):
        assert f"step-{max_steps - 3:08d}" in train(parts, num_processes, batch_size, max_steps)
    whole, continued = losses(tmp_path / "whole"), losses(parts)
    assert len(whole) == len(continued) == 9
    assert whole[:3] == continued[:3]
    assert max(abs(a - b) / a for a, b in zip(whole, continued, strict=True)) < 1e-9
