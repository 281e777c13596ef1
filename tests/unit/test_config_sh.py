"""config.sh: the demo's data and preset are taken only where the command line names nothing else."""

import subprocess
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "config.sh"


@pytest.mark.parametrize(
    ("flags", "demo"),
    [
        ([], True),
        (["--max-steps", "2"], True),
        (["--rec", "photos"], False),
        (["--rec=photos"], False),
        (["--dataset", "emore"], False),
        (["--config", "configs/mine"], False),
    ],
)
def test_whose_data_is_trained_on(flags, demo):
    done = subprocess.run(
        ["bash", CONFIG, *flags], env={"PATH": "/usr/bin:/bin", "PYTHON": "/bin/echo"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert ("--dataset glyphs" in done.stdout) == demo
    assert done.stdout.split()[-len(flags) :] == flags or not flags
