"""Every operation of the disk fails, in every way; the power goes after each."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.recipes.conftest import ROOT, environment

# As many processes as cores: saves into one folder and the tools; saves into a folder of each rank.
_SHARES = ("one", "each")
_WAYS = ("fail (EIO once)", "fail (EIO from there on", "fail (ENOSPC once)", "short", "crash")


@pytest.mark.long
def test_no_failing_operation_and_no_power_cut_harms_a_checkpoint(tmp_path: Path) -> None:
    """Saves by two ranks, in one folder and in two; a save again, pruning, owner records; each tool that writes."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.enumeration", str(tmp_path / share), share],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for share in _SHARES
    ]
    outputs = [process.communicate(timeout=500)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(outputs)[-10_000:]
    total: Counter[str] = Counter()
    for line in "".join(outputs).splitlines():
        counts = json.loads(line)
        # Whatever it does, each of its operations failed, and some wrote less than they were to.
        assert counts["fail (EIO once)"] >= 0.98 * counts["operations"], counts
        assert all(any(key.startswith(way) for key in counts) for way in _WAYS), counts
        total += Counter({name: n for name, n in counts.items() if isinstance(n, int)})
    assert total["crash states"] >= 20_000, total
