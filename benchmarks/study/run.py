"""Trains one run of a study, measures it, and writes its result."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import measure, sets
from .cells import BATCH, POINTS, Cell

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
BITS_DEPEND_ON = ("processor", "instructions", "torch", "numpy")  # of "made_by"
GLYPHS = f"--dataset glyphs --precision fp32 --batch-size {BATCH} --num-workers 1 --verbose 0"


@dataclass(frozen=True)
class Data:
    """What a run trains and is measured on. rec: of the trainer's --rec. flags: besides the arm's. digest: of what the
    figures depend on. table: of the head. seen: other drawings of the characters of the training set."""

    rec: str
    held_out: measure.HeldOut
    steps: int
    flags: str
    digest: str
    table: str = ""
    seen: Path | None = None
    original: Path | None = None


def held_out(root: Path) -> measure.HeldOut:
    folder = sets.folder(root, "heldout")
    return measure.HeldOut.read(folder, [face != sets.never_trained() for face in sets.typefaces_of_rows(folder)])


def run(folder: Path, cell: Cell, seed: int, data: Data, arm: str) -> dict[str, Any]:
    """Trains in a folder, which is removed, and measures; returns {"cell", "seed", "figures", "made_by"}. arm: its
    flags. Raises ValueError with the end of what the trainer printed, where it fails."""
    began, made_by = time.time(), here()
    shutil.rmtree(folder, ignore_errors=True)
    try:
        train(folder, seed, data, arm)
        trained = time.time()
        figures = _figures(folder, data)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    made_by |= {"data": data.digest, "train_s": round(trained - began), "all_s": round(time.time() - began)}
    return {"cell": str(cell), "seed": seed, "steps": data.steps, "figures": figures, "made_by": made_by}


def train(folder: Path, seed: int, data: Data, arm: str, points: int = POINTS) -> None:
    flags = f"--rec {data.rec} --models-root {folder} --seed {seed} --max-steps {data.steps} --check-data off "
    flags += f"--checkpoint-every {data.steps // points} --keep-checkpoints {points} --val-targets "
    command = [sys.executable, "train.py", "face", *shlex.split(f"{flags} {data.flags} {arm}")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    if done.returncode:
        raise ValueError(f"{shlex.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}")


def _figures(folder: Path, data: Data) -> dict[str, Any]:
    torch.set_num_threads(1)
    at = [data.steps * number // POINTS for number in range(1, POINTS + 1)]
    checkpoints = [folder / "checkpoints" / f"step-{step:08d}" for step in at]
    curve = {step: measure.point(checkpoint, data.held_out) for step, checkpoint in zip(at, checkpoints, strict=True)}
    original_C = None if data.original is None else np.load(data.original)
    return {"curve": curve, **measure.end(checkpoints[-1], data.held_out, data.table, data.seen, original_C)}


def here() -> dict[str, Any]:
    """Returns what bits may depend on, and the commit."""
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True, capture_output=True)
    cpu = [line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "commit": said.stdout.strip(),
        "processor": (cpu or [platform.processor()])[0],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        **{name: version(name) for name in ("torch", "numpy", "opencv-python-headless")},
        "python": platform.python_version(),
    }


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    temporary.rename(path)
