"""A training whose every write to stdout and stderr fails is a training like any other."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.disk.operations import compiled
from tests.running import ROOT, environment

FLAGS = (
    "--dataset synthetic --network tiny --num-classes 20 --num-images 64 --image-size 24 --batch-size 4 --max-steps 3 "
    "--device cpu"
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        pytest.param(errno.EPIPE, ["train", "face"], id="one process, EPIPE"),
        pytest.param(errno.EIO, ["train", "face", "--gpus", "2"], id="--gpus 2, EIO", marks=pytest.mark.long),
    ],
)
def test_no_write_to_the_terminal_has_to_succeed(tmp_path: Path, error: int, words: list[str]) -> None:
    shim = {"LD_PRELOAD": str(compiled(tmp_path)), "DISK_SHIM_OUTPUT_ERROR": str(error)}
    command = [sys.executable, "-m", "partial_fc", *words, *FLAGS.split(), "--models-root", str(tmp_path / "run")]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment(), **shim}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, b"")
    assert (tmp_path / "run/model.safetensors").exists()
    assert "Training is over" in (tmp_path / "run/training.log").read_text()
    assert "step 3/3" in (tmp_path / "run/training.log").read_text()
