"""A training whose ranks are killed has the losses of one that was left alone; unequal losses are told."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.running import ROOT, SMALL, environment

JOB = shlex.split(
    "--dataset synthetic --num-classes 50 --num-images 64 --image-size 16 --batch-size 4 --precision fp64 "
    "--max-steps 60 --checkpoint-every 5"
)


@pytest.mark.long
@pytest.mark.parametrize("flags", [[], ["--gpus=2", "--restarts=9"]], ids=["one process", "two ranks, supervised"])
def test_a_run_whose_ranks_are_killed_cannot_be_told_from_one_that_was_left_alone(tmp_path, flags):
    command = [sys.executable, "train.py", "face", *SMALL, *JOB, *flags]
    words = [sys.executable, "-m", "tests.faults.torture", str(tmp_path), "--mean-steps", "15", "--", *command]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "output.txt").read_text()[-3000:]
    kills, starts = map(int, re.search(r"(\d+) kills, (\d+) starts", done.stdout).groups())
    assert kills >= 1
    assert starts == (1 if flags else kills + 1)
