"""Every operation of the disk fails, in every way; the power goes after each."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.running import ROOT, environment

_MEMORY = Path("/dev/shm")
# "prune" and "re-save" with a folder each are as much work as all these; `make torture` has them, too.
_SWEEPS = ("one folder", "new")
_WAYS = ("fail (EIO once)", "fail (EIO from there on", "fail (ENOSPC once)", "short", "crash")


@pytest.mark.long
def test_no_failing_operation_and_no_power_cut_harms_a_checkpoint(tmp_path: Path) -> None:
    """Saves by two ranks, in one folder and in two; a save again, pruning, the lock."""
    with TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else tmp_path) as folder:
        # timeout(1) ends all of them, should one hang.
        command = ["timeout", "900", sys.executable, "-m", "tests.faults.disk.enumeration", folder, *_SWEEPS]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    total: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        counts = json.loads(line)
        # Whatever it does, each of its operations failed, and some wrote less than they were to.
        assert counts["fail (EIO once)"] >= 0.98 * counts["operations"], counts
        assert all(any(key.startswith(way) for key in counts) for way in _WAYS), counts
        total += Counter({name: n for name, n in counts.items() if isinstance(n, int)})
    assert total["crash states"] >= 10_000, total
