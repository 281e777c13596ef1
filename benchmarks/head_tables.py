"""The tables of docs/benchmarks.md: the head beside plain PyTorch, F.linear_cross_entropy and the textbook head.

    python -m benchmarks.head_tables                        all cells, with the instructions that torch takes here
    python -m benchmarks.head_tables --instructions avx2    as on a machine that has no more
    python -m benchmarks.head_tables --batches 128 --rates 0.1 --keep DIR      some of the cells: each is a file of DIR
    python -m benchmarks.head_tables --keep DIR --print     the tables of what was measured, nothing anew

Markdown, to be put into the document as it is: processor, dtypes, rows of each side, the median ratio of the rounds,
the smallest and the largest. In each cell all sides run in turn, in processes of their own: this
head with fp32 operands and rows, this head with the operands of --precision auto and bf16 rows, and the others in fp32
and, where this machine multiplies bfloat16 numbers, with such operands, too: the faster of both counts in the second
table. A side that did not train as many rows as this head has no ratio.
"""

import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import torch
import tyro
from tqdm import tqdm

from benchmarks.head import OURS, HeadOptions, Line, compare, run
from partial_fc.machine import has_bf16

# Classes of all processes, by (batch, rate): as many as leave a step of the slowest side at some seconds.
CLASSES = {
    (128, 0.1): 1_000_000,
    (128, 1.0): 400_000,
    (1024, 0.1): 600_000,
    (1024, 1.0): 60_000,
    (8192, 0.1): 200_000,
    (8192, 1.0): 20_000,
}
LOWERED = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
OTHERS: tuple[Literal["plain", "torch", "insightface-style"], ...] = ("plain", "torch", "insightface-style")


@dataclass(frozen=True)
class TableOptions:
    """Measures the head beside others, and prints Markdown."""

    instructions: Literal["here", "avx2", "default"] = "here"
    """Those that all sides may use: of torch, MKL, oneDNN and our kernel."""
    batches: tuple[int, ...] = (128, 1024, 8192)
    """Global batches: 128, 1024, 8192."""
    rates: tuple[float, ...] = (0.1, 1.0)
    """Sample rates: 0.1, 1.0."""
    num_processes: int = 2
    """Processes of a thread each."""
    steps: int = 2
    """Timed steps of each run, after one that is not."""
    rounds: int = 3
    """Rounds of runs in turn: the median counts, the smallest and the largest stand beside it."""
    scale: float = 1.0
    """Part of the classes that a cell usually has: for trying it out."""
    keep: Path | None = None
    """A folder for what was measured, a file a cell; an earlier run's cells are measured anew."""
    print: bool = False
    """Only prints the tables of --keep."""


def main(options: TableOptions) -> int:
    os.environ.update(LOWERED.get(options.instructions, {}))  # of the processes that measure
    folder = options.keep or Path(mkdtemp(prefix="partial-fc-head-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not options.print:
        chosen = [(batch, rate) for batch in options.batches for rate in options.rates]
        if unknown := set(chosen) - set(CLASSES):
            print(f"no cell for batch and rate {sorted(unknown)}; there are {sorted(CLASSES)}", file=sys.stderr)
            return 2
        for batch, rate in tqdm(chosen, "cells", disable=None):
            cell = _measure(options, batch, rate)
            (folder / f"{options.instructions}-{batch}-{rate}.json").write_text(json.dumps(cell, indent=1))
    for line in tables(options, folder):
        print(line)
    return 0


def _measure(options: TableOptions, batch: int, rate: float) -> dict[str, Any]:
    """A cell: "classes", "processor" and "rounds", for each the lines of its runs by what was run."""
    usual = HeadOptions(
        classes=int(CLASSES[batch, rate] * options.scale),
        sample_rate=rate,
        batch=batch,
        num_processes=options.num_processes,
        steps=options.steps,
    )
    wide, narrow = replace(usual, dtype="fp32"), replace(usual, dtype="bf16")
    # Asked here, where the environment was set too late for it: the lowered sets have none.
    with_bf16 = options.instructions == "here" and has_bf16(torch.device("cpu"))
    rounds = []
    for _ in range(options.rounds):
        runs = {f"{OURS} fp32": run(wide, OURS, "fp32"), f"{OURS} bf16 rows": run(narrow, OURS, "auto")}
        for side in OTHERS:
            for precision in ("fp32", "bf16") if with_bf16 else ("fp32",):
                runs[f"{side} {precision}"] = run(usual, side, precision)
        rounds.append(runs)
    return {"classes": usual.classes, "processor": _processor(), "rounds": rounds}


def _processor() -> str:
    said = dict(re.findall(r"^(.+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    name = said.get("model name", "unknown processor")
    kind = f" (family {said['cpu family']}, model {said['model']})" if "cpu family" in said else ""
    return f"{len(os.sched_getaffinity(0))} cores of {name}{kind}"


def tables(options: TableOptions, folder: Path) -> list[str]:
    """Two: fp32 on all sides; this head with bf16 rows beside the faster of what the others have."""
    cells = {}
    for (batch, rate), _ in sorted(CLASSES.items(), key=lambda item: (item[0][1], item[0][0])):
        path = folder / f"{options.instructions}-{batch}-{rate}.json"
        if path.exists():
            cells[batch, rate] = json.loads(path.read_text())
    if not cells:
        return [f"nothing was measured in {folder}"]
    any_cell = next(iter(cells.values()))
    any_run = any_cell["rounds"][0][f"{OURS} bf16 rows"]
    lines = [f"### {any_run['instructions']} instructions, kernel {any_run['impl']}, torch {any_run['torch']}", ""]
    lines += [f"{any_cell['processor']}; {len(any_cell['rounds'])} round(s) in turn.", ""]
    for ours in ("fp32", "bf16 rows"):
        rows = [row for key, cell in cells.items() for row in _rows(key, cell, ours)]
        lines += [*_heading(ours, any_run), *rows, ""]
    return lines


_COLUMNS = (
    *("rate", "batch", "classes", "side", "operands", "rows", "s", "times as long", "smallest", "largest", "GB"),
    *("of torch.mm", "products, s", "bytes, s"),
)


def _heading(ours: str, any_run: Line) -> list[str]:
    what = "All sides: fp32 operands, centres, momentum and sums."
    if ours != "fp32":
        what = (
            f"This head: {any_run['precision']} operands, bf16 centres and momentum, fp32 sums. The others: the faster "
            "of their operands, fp32 centres, momentum and sums (of `torch` with bf16 operands: bf16 sums)."
        )
    return [what, "", _line(_COLUMNS), _line(["---"] * len(_COLUMNS))]


def _rows(key: tuple[int, float], cell: dict[str, Any], ours: str) -> list[str]:
    """The lines of a cell: this head, then each other side with its faster operands."""
    (batch, rate), rounds, name = key, cell["rounds"], f"{OURS} {ours}"
    sides: dict[str, Line] = {OURS: compare(rounds, name, name)}
    for side in OTHERS:
        kinds = ["fp32"] if ours == "fp32" else [p for p in ("fp32", "bf16") if f"{side} {p}" in rounds[0]]
        sides[side] = min((compare(rounds, name, f"{side} {kind}") for kind in kinds), key=lambda f: f["step_s"])
    lines = []
    for label, found in sides.items():
        ratios = ["", "", ""]
        if label != OURS:
            compared = "times_as_fast" in found
            numbers = (found["times_as_fast"], *found["times_as_fast_range"]) if compared else ()
            ratios = [f"{number:.3g}" for number in numbers] or ["not compared", "", ""]
        own = ["", "", ""]
        if label == OURS:
            own = [f"{found['share_of_matmul']:.0%}", f"{found['products_s']:.3g}", f"{found['bytes_s']:.3g}"]
        cells = [f"{rate:.1f}", f"{batch:,}", f"{cell['classes']:,}", label, found["precision"], f"{found['rows']:,}"]
        lines.append(_line([*cells, f"{found['step_s']:.3g}", *ratios, f"{found['added_bytes'] / 1e9:.2f}", *own]))
    return lines


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(TableOptions)))
