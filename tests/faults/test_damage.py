"""Checkpoints that are damaged before a run goes on. `make torture` does it a thousand times."""

import json
from pathlib import Path

from tests.faults.damaging import KINDS
from tests.faults.test_runs import run


def test_a_run_goes_on_from_the_newest_that_is_whole(tmp_path: Path) -> None:
    done = run("damage", str(tmp_path), "--rounds", "50", "--runs", "1", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    damaged = json.loads(done.stdout.splitlines()[-1])["damaged"]
    assert damaged.keys() == {
        *KINDS,
        "COMPLETE",
        ".sha256",
        ".json",
        ".safetensors",
        ".txt",
        "checkpoints",
        "rollbacks",
    }
