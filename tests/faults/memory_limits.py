"""Trains under memory limits, from a little more than training alone takes to twice that:

    python -m tests.faults.memory_limits FOLDER

One process in a memory cgroup of its own, below the one that this is run in (v1 or v2; as root). First without a limit
and without checkpoints, which gives the peak (the largest of three runs, since where the C library puts what changes
it by a few percent); then with limits of 1.02 to 2 times that and a checkpoint every few
steps. None may be killed, and each must leave a checkpoint that is whole. AssertionError: it is not so.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from partial_fc.memory import _V1, _memory_cgroups
from tests.faults.kills import complete
from tests.faults.ranks import steps_done
from tests.recipes.conftest import ROOT

FACTORS = (1.02, 1.1, 1.25, 1.5, 2.0)
STEPS = 12
_COMMON = shlex.split(
    "--dataset synthetic --num-images 512 --batch-size 8 --optimizer sgd --lr 0.003 --lr-scaling none "
    "--lr-scheduler constant --warmup-epochs 0 --num-workers 1 --precision fp32 --frequent 10 --verbose 0"
)
# What a checkpoint's copy is mostly made of.
JOBS = {
    "centres": "--num-classes 400000 --embedding-size 128 --sample-rate 1.0 --backbone tiny --image-size 24",
    "sampled centres": "--num-classes 400000 --embedding-size 128 --sample-rate 0.1 --backbone tiny --image-size 24",
    "backbone": "--num-classes 2000 --embedding-size 512 --sample-rate 1.0 --backbone r50 --image-size 112",
}


@contextmanager
def memory_group(name: str) -> Iterator[Path]:
    """A memory cgroup below this process's. Raises OSError where none can be made."""
    above = next((folder for folder, _, _ in _memory_cgroups(Path("/proc/self")) if folder.is_dir()), None)
    if above is None:
        raise OSError("this process is in no memory cgroup that can be seen")
    group = above / f"{name}-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        group.rmdir()


def set_limit(group: Path, num_bytes: int) -> None:
    """On memory, and so on what the processes there have of the page cache."""
    is_v1 = (group / _V1[0]).exists()
    (group / (_V1[0] if is_v1 else "memory.max")).write_text(str(num_bytes))


def peak_of(group: Path) -> int:
    is_v1 = (group / _V1[0]).exists()
    return int((group / ("memory.max_usage_in_bytes" if is_v1 else "memory.peak")).read_text())


def train(folder: Path, flags: list[str], limit: int | None) -> tuple[int, int, str]:
    """(status, the most bytes that were in use, output)."""
    folder.mkdir(parents=True)
    with memory_group("limited") as group:
        if limit is not None:
            set_limit(group, limit)
        done = subprocess.run(
            [sys.executable, ROOT / "train.py", "face", *_COMMON, *flags],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
        )
        return done.returncode, peak_of(group), done.stdout


def sweep(folder: Path, job: str) -> Iterator[dict[str, Any]]:
    """Figures of each limit."""
    flags = shlex.split(JOBS[job])
    peak = 0
    for number in range(3):
        status, used, output = train(folder / f"peak-{number}", [*flags, "--max-steps", str(STEPS)], None)
        assert status == 0, output
        peak = max(peak, used)
    for factor in FACTORS:
        root = folder / f"{factor}"
        more = ["--max-steps", str(STEPS), "--checkpoint-every", "4", "--models-root", str(root / "run")]
        status, used, output = train(root, [*flags, *more], int(factor * peak))
        whole = complete(root / "run")
        yield {
            "job": job,
            "peak_mb": round(peak / 1e6),
            "factor": factor,
            "used_mb": round(used / 1e6),
            "status": status,
            "steps": steps_done(root / "run"),
            "checkpoints": [path.name for path in whole],
            "stood_still": "while training stands still" in output,
        }
        assert status == 0, f"{factor} times the peak: status {status} (-9: killed)\n{output}"
        assert whole, f"{factor} times the peak: no checkpoint\n{output}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", nargs="*", choices=list(JOBS), default=list(JOBS))
    options = parser.parse_args()
    for job in options.jobs:
        for figures in sweep(options.folder / job.replace(" ", "-"), job):
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
