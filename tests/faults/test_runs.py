"""Runs that are stopped and left without a disk."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.ranks import check_whole, complete, flags, train
from tests.running import Ranks, steps_done


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs root and tmpfs: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.long
def test_a_disk_fills_up(tmp_path: Path) -> None:
    """The run says so and goes on; what was complete stays so; with room again the next one is complete; and a run can
    go on from it. The schedule is that of an endless run, which SIGTERM ends."""
    root, output = tmp_path / "full", tmp_path / "output-full"
    with mounted(root, "size=100m"):
        endless = [*flags(root, 1_000_000, 4), "--lr-scheduler", "constant"]
        running = Ranks(output, train, endless)
        assert running.until(lambda: len(complete(root)) >= 2), running.output()
        filler = (root / "filler").open("wb", buffering=0)
        _fill(filler)
        assert running.until(lambda: "was not written" in running.output(0) + running.output(1)), running.output()
        stand = complete(root)
        # What a checkpoint that is given up leaves is filled again, and the last page of loss.csv fills up by itself.
        assert running.until(lambda: _fill(filler) or "loss.csv cannot be written" in running.output(0)), (
            running.output()
        )
        told = _steps_said(running)
        assert running.until(lambda: _steps_said(running) >= told + 20), f"training stands still\n{running.output()}"
        assert not running.poll(), f"it did not go on\n{running.output()}"
        assert stand[-1] in complete(root) or complete(root)[-1] > stand[-1]
        check_whole(root)
        assert "Make room" in running.output(0)
        filler.truncate(0)
        newest = complete(root)[-1]
        assert running.until(lambda: complete(root)[-1] > newest), f"room again, but nothing\n{running.output()}"
        running.signal(0, signal.SIGTERM)
        assert running.wait() == [75, 75], running.output()
        check_whole(root)
        rows = (root / "loss.csv").read_text().splitlines()[1:]
        assert [int(row.partition(",")[0]) for row in rows] == list(range(1, steps_done(root) + 1))
        last = complete(root)[-1]
        again = Ranks(output, train, [*flags(root, steps_done(root) + 2, 4), "--lr-scheduler", "constant"])
        assert again.wait() == [0, 0], again.output()
        assert f"resumed from {last}" in again.output(0)
        filler.close()


def _steps_said(running: Ranks) -> int:
    """By what rank 0 prints: loss.csv is on the disk that is full."""
    return max(map(int, re.findall(r"\bstep (\d+)/", running.output(0))), default=0)


def _fill(file) -> bool:
    try:
        while True:
            file.write(bytes(1 << 20))
    except OSError:
        return False  # full


@pytest.mark.long
def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    """An error at the start, on both ranks, and not after hours."""
    root, output = tmp_path / "read-only", tmp_path / "output-read-only"
    with mounted(root / "checkpoints", "size=1m,ro"):
        running = Ranks(output, train, flags(root, 10, 2))
        assert running.wait() == [1, 1], running.output()
        assert all(f"{root / 'checkpoints'}" in running.output(rank) for rank in (0, 1)), running.output()
        assert steps_done(root) == 0


@pytest.mark.long
def test_a_rank_stands_still(tmp_path: Path) -> None:
    """For some seconds (SIGSTOP, SIGCONT): the other waits, and the run ends as one that nobody stopped."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert Ranks(tmp_path / "output-whole", train, flags(whole, 20, 10)).wait() == [0, 0]
    running = Ranks(tmp_path / "output-stopped", train, flags(stopped, 20, 10))
    assert running.until(lambda: steps_done(stopped) >= 5), running.output()
    running.signal(1, signal.SIGSTOP)
    time.sleep(1)  # it stands; the other is at most in the next step
    seen = steps_done(stopped)
    time.sleep(2)
    assert steps_done(stopped) == seen, "rank 0 went on alone"
    running.signal(1, signal.SIGCONT)
    assert running.wait() == [0, 0], running.output()
    assert (whole / "loss.csv").read_text() == (stopped / "loss.csv").read_text()
