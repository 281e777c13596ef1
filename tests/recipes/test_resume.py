"""Runs that are continued, by as many processes and by another number."""

import shlex
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.conftest import SMALL, losses, result, run, train


@pytest.mark.parametrize("launcher", ["one process", "horovodrun --gloo", "torchrun"])
def test_resume_continues_bit_by_bit(glyphs, tmp_path, launcher):
    flags = f"--dataset glyphs --rec {glyphs} --val-targets --batch-size 8 --lr-scheduler constant --sample-rate 0.3 "
    flags += "--dropout 0.2 --clip 5 --checkpoint-every 10 --max-steps "
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, flags + "30", launcher=launcher)
    train(parts, flags + "10", launcher=launcher)
    printed = train(parts, flags + "30", launcher=launcher)
    assert "resumed from" in printed
    assert losses(parts) == losses(whole)
    finished = result(parts)
    assert "is finished" in train(parts, flags + "30", launcher=launcher)
    assert result(parts) == finished
    if launcher == "one process":
        assert "is ahead of where this run would start" in train(parts, flags + "30 --resume never", expect=1)
    files = sorted(path.name for path in (whole / "checkpoints/step-00000030").glob("*.safetensors"))
    assert len(files) == (4 if launcher == "one process" else 6)
    for name in files:
        a, b = (load_file(root / "checkpoints/step-00000030" / name) for root in (whole, parts))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name


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

    def part(root, num_processes: int, batch_size: int, max_steps: int) -> str:
        torchrun = ["torchrun", "--standalone", f"--nproc_per_node={num_processes}"]
        flags = (
            f"--dataset glyphs --rec {glyphs} --val-targets --sync-bn --sample-rate 0.5 --lr-scheduler constant "
            f"{flags_of_run} --batch-size {batch_size} --max-steps {max_steps} --check-data off"
        )
        launched = [*torchrun, "train.py"] if num_processes > 1 else [sys.executable, "train.py"]
        return run([*launched, "face", "--models-root", str(root), *SMALL, *shlex.split(flags)])

    part(tmp_path / "whole", 1, 24, num_steps)
    parts = tmp_path / "parts"
    part(parts, 1, 24, 3)
    for num_processes, batch_size, first, last in ((8, 3, 3, 6), (3, 8, 6, num_steps)):
        assert f"step-{first:08d}" in part(parts, num_processes, batch_size, last)
    whole, continued = losses(tmp_path / "whole"), losses(parts)
    assert len(whole) == len(continued) == num_steps
    assert whole[:3] == continued[:3]
    assert max(abs(a - b) / a for a, b in zip(whole, continued, strict=True)) < equal_to
