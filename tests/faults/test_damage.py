"""Checkpoints that are damaged before a run goes on. `make torture` does it a thousand times."""

import json
from pathlib import Path

from tests.faults.test_runs import run


def test_a_run_goes_on_from_the_newest_that_is_whole(tmp_path: Path) -> None:
    done = run("damage", str(tmp_path), "--rounds", "40", "--runs", "2", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    damaged = json.loads(done.stdout.splitlines()[-1])["damaged"]
    kinds = ("flip", "cut", "remove", "COMPLETE", ".sha256", "manifest.json", ".safetensors", "rollbacks")
    assert all(damaged[kind] > 0 for kind in kinds), damaged
