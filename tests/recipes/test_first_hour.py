"""README.md's first hour: its commands, in its order, in an empty folder with an empty HOME (first_hour.sh)."""

import subprocess
import sys
from pathlib import Path

from tests.recipes.conftest import ROOT, environment


def test_all_that_the_readme_promises_is_there():
    venv = Path(sys.executable).parent.parent
    ran = subprocess.run(
        ["bash", str(ROOT / "tests/recipes/first_hour.sh"), str(venv)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all that README.md promises is there" in ran.stdout
