"""Runs that are killed, stopped and left without a disk. `make torture` kills fifty times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.disk.full_disks import CANNOT_MOUNT
from tests.recipes.conftest import ROOT, environment


def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which forks the ranks."""
    command = [sys.executable, "-m", f"tests.faults.{module}", *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=500)


@pytest.mark.long
def test_kills_at_random_moments_leave_no_trace(tmp_path: Path) -> None:
    done = run("kills", str(tmp_path), "--rounds", "4", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    killed = json.loads(done.stdout.splitlines()[-1])["killed"]
    assert sum(killed.values()) >= 3  # a run can be faster than its killer, but not always


@pytest.mark.long
def test_full_and_read_only_disks_and_a_rank_that_stands_still(tmp_path: Path) -> None:
    done = run("disk.full_disks", str(tmp_path))
    if done.returncode == CANNOT_MOUNT:
        pytest.skip(f"needs root and tmpfs: {done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
