"""Speed and memory of the precision modes, on the demo's job.

    python -m benchmarks.precision --modes fp32 bf16 fp16 fp16-o2 --rounds 3

Each mode trains in turn, so often as there are rounds, since a machine's speed drifts; medians are reported. Accuracy
takes whole runs: `bash scripts/demo.sh --precision MODE`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import tyro

from benchmarks.demo_job import DEMO, demo_job

ROOT = Path(__file__).parents[1]
REPORT_EVERY = 10  # steps; the first interval warms up and counts for nothing


@dataclass(frozen=True)
class Options:
    """Trains the demo for a few steps in each mode; prints a table and one JSON line."""

    modes: tuple[str, ...] = ("fp32", "bf16", "fp16", "fp16-o2")
    """Values of --precision."""
    processes: int = 2
    """Processes on this machine."""
    steps: int = 60
    """Steps of each run; all but the first 10 are timed."""
    rounds: int = 3
    """Runs of each mode."""

    def __post_init__(self) -> None:
        if self.steps < 2 * REPORT_EVERY or self.rounds < 1 or self.processes < 1:
            raise ValueError(
                f"--steps {self.steps} --rounds {self.rounds} --processes {self.processes}; expected at least "
                f"{2 * REPORT_EVERY}, 1 and 1"
            )


def main() -> None:
    options = tyro.cli(Options)
    found: dict[str, list[dict]] = {mode: [] for mode in options.modes}
    for number in range(options.rounds):
        for mode in options.modes:
            result = _train(options, mode)
            found[mode].append(result)
            print(
                f"[{time.strftime('%H:%M:%S')}] round {number + 1}/{options.rounds} {mode}: "
                f"{result['images_per_s']:.0f} images/s, {result['peak_memory_bytes'] / 2**20:.0f} MiB, "
                f"loss {result['loss']:.4f}",
                file=sys.stderr,
                flush=True,
            )
    rows = [
        {"mode": mode, **{k: median(r[k] for r in runs) for k in ("images_per_s", "peak_memory_bytes", "loss")}}
        for mode, runs in found.items()
    ]
    print("| precision | images/s | a process's memory at its peak | loss |\n| --- | --- | --- | --- |")
    for row in rows:
        memory = f"{row['peak_memory_bytes'] / 2**20:.0f} MiB"
        print(f"| {row['mode']} | {row['images_per_s']:.0f} | {memory} | {row['loss']:.4f} |")
    data = "demo/glyphs" if DEMO.exists() else "synthetic"
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({**asdict(options), "data": data, "rows": rows, "cores": cores, "torch": torch.__version__}))


def _train(options: Options, mode: str) -> dict:
    """What result.json says of a run. Raises ValueError with the end of what was printed, where it fails."""
    with tempfile.TemporaryDirectory(prefix="precision-") as folder:
        command = ["bash", "config.sh", *demo_job(options.steps, REPORT_EVERY), "--precision", mode]
        command += ["--gpus", str(options.processes), "--models-root", folder]
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise ValueError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}")
        return json.loads((Path(folder) / "result.json").read_text())


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"precision: {error}")
