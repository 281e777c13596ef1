"""Disks that fill up or cannot be written to, and a rank that stands still for a while:

    python -m tests.faults.disk.full_disks FOLDER           as root, on Linux: it mounts small file systems below FOLDER

AssertionError: the run did not do what it should. Exit status 3: nothing can be mounted here.
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.kills import complete
from tests.faults.ranks import Ranks, flags, preload, steps_done

CANNOT_MOUNT = 3


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        print(f"mount: {done.stderr.strip()}", flush=True)
        sys.exit(CANNOT_MOUNT)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def disk_fills_up(folder: Path) -> None:
    """The run says so and goes on; what was complete stays so; with room again the next one is complete; and a run can
    go on from it. The schedule is that of an endless run, which SIGTERM ends."""
    root, output = folder / "full", folder / "output-full"
    with mounted(root, "size=100m"):
        endless = [*flags(root, 1_000_000, 4), "--lr-scheduler", "constant"]
        running = Ranks(output, endless)
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
        _check_whole(complete(root))
        assert "Make room" in running.output(0)
        filler.truncate(0)
        newest = complete(root)[-1]
        assert running.until(lambda: complete(root)[-1] > newest), f"room again, but nothing\n{running.output()}"
        running.signal(0, signal.SIGTERM)
        assert running.wait() == [75, 75], running.output()
        _check_whole(complete(root))
        rows = (root / "loss.csv").read_text().splitlines()[1:]
        assert [int(row.partition(",")[0]) for row in rows] == list(range(1, steps_done(root) + 1))
        last = complete(root)[-1]
        again = Ranks(output, [*flags(root, steps_done(root) + 2, 4), "--lr-scheduler", "constant"])
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


def _check_whole(folders: list[Path]) -> None:
    from partial_fc.verbs.checkpoint.verify import findings

    assert folders
    for folder in folders:
        bad = [text for kind, text in findings([folder], finite=True) if kind == "bad"]
        assert not bad, f"{folder} counts, but: {bad}"


def cannot_be_written(folder: Path) -> None:
    """An error at the start, on both ranks, and not after hours."""
    root, output = folder / "read-only", folder / "output-read-only"
    with mounted(root / "checkpoints", "size=1m,ro"):
        running = Ranks(output, flags(root, 10, 2))
        assert running.wait() == [1, 1], running.output()
        assert all(f"{root / 'checkpoints'}" in running.output(rank) for rank in (0, 1)), running.output()
        assert steps_done(root) == 0


def rank_stands_still(folder: Path) -> None:
    """For some seconds (SIGSTOP, SIGCONT): the other waits, and the run ends as one that nobody stopped."""
    whole, stopped = folder / "whole", folder / "stopped"
    assert Ranks(folder / "output-whole", flags(whole, 20, 10)).wait() == [0, 0]
    running = Ranks(folder / "output-stopped", flags(stopped, 20, 10))
    assert running.until(lambda: steps_done(stopped) >= 5), running.output()
    running.signal(1, signal.SIGSTOP)
    time.sleep(1)  # it stands; the other is at most in the next step
    seen = steps_done(stopped)
    time.sleep(2)
    assert steps_done(stopped) == seen, "rank 0 went on alone"
    running.signal(1, signal.SIGCONT)
    assert running.wait() == [0, 0], running.output()
    assert (whole / "loss.csv").read_text() == (stopped / "loss.csv").read_text()


def main() -> None:
    preload()
    folder = Path(sys.argv[1])
    for scenario in (rank_stands_still, cannot_be_written, disk_fills_up):
        start = time.monotonic()
        scenario(folder)
        print(f"{scenario.__name__}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
