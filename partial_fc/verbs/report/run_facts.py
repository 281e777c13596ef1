"""The contents of a run's folder, read for a report. Everything may be missing: the run may have just begun."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.checkpoint.folders import MANIFEST, complete
from partial_fc.files import read_manifest
from partial_fc.train.record.curve import read_losses, read_scalars

_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) rank (\d+) ([A-Z]) (.*)")
_MOST_LINES = 40
# Pictures with their own place in the report.
_TITLES = {"roc": "ROC: true accept rate over false accept rate", "neighbours": "Searched images and the nearest ones"}


@dataclass
class RunFacts:
    """The facts of a run. values: the flags, by name; differs: those not at their default (None: unknown)."""

    root: Path
    start: dict[str, Any]  # configuration.json
    values: dict[str, Any]
    differs: dict[str, Any] | None
    result: dict[str, Any]
    scalars: dict[str, list[tuple[int, float]]]  # (step, value) by name, as TensorBoard has them
    loss_N3: NDArray[np.float64]  # step, loss, learning rate
    checkpoints: list[tuple[Path, dict[str, Any]]]  # with their manifests
    problems: list[str] = field(default_factory=list)  # warnings and errors of all ranks
    num_problems: int = 0
    first_batch: bytes | None = None  # PNG
    pictures: list[tuple[str, bytes]] = field(default_factory=list)  # title, PNG

    @property
    def recipe(self) -> str:
        newest = self.checkpoints[-1][1] if self.checkpoints else {}
        return str(self.start.get("recipe") or newest.get("recipe") or "?")

    @property
    def total_steps(self) -> int | None:
        return self.result.get("steps") or self.values.get("max_steps")

    @property
    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """(step, score) by evaluated set."""
        return {name.removeprefix("score/"): rows for name, rows in self.scalars.items() if name.startswith("score/")}

    @property
    def last_step(self) -> int:
        return int(self.loss_N3[-1, 0]) if len(self.loss_N3) else 0

    @property
    def is_finished(self) -> bool:
        return bool(self.result) and self.last_step <= self.result.get("steps", 0)


def read_run(root: Path) -> RunFacts:
    """Reads a run's folder. Raises ValueError if it has no run."""
    start, result = _json(root / "configuration.json"), _json(root / "result.json")
    values = start.get("configuration") or result.get("configuration") or {}
    elsewhere = values.get("checkpoint_dir")
    folders = complete(Path(elsewhere) if elsewhere else root / "checkpoints")
    checkpoints = [(folder, _json(folder / MANIFEST)) for folder in folders]
    if not values and checkpoints:
        values = checkpoints[-1][1].get("configuration", {})
    if not (values or (root / "loss.csv").exists()):
        raise ValueError(
            f"{root} is no folder of a run; expected configuration.json, loss.csv or result.json in it: give the "
            "run's --models-root"
        )
    found = RunFacts(
        root, start, values, start.get("differs"), result, read_scalars(root), read_losses(root), checkpoints
    )
    _read_logs(found)
    first_batch = root / "first_batch.png"
    found.first_batch = first_batch.read_bytes() if first_batch.exists() else None
    afterwards = sorted([*root.glob("evaluat*/*.png"), *root.glob("search*/*.png")])
    again = {path.stem for path in afterwards}  # a later evaluation replaces training's picture
    for path in [*(path for path in sorted(root.glob("*.png")) if path.stem not in again), *afterwards]:
        if path != first_batch:
            where = "" if path.parent == root else f" ({path.parent.name})"
            title = _TITLES.get(path.stem, path.stem.replace("_", " ").capitalize())
            found.pictures.append((title + where, path.read_bytes()))
    return found


def _json(path: Path) -> dict[str, Any]:
    """Reads a JSON object, empty without a file. Raises ValueError for anything else."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_manifest(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: invalid JSON ({error}); move it away and run report again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {type(value).__name__}; expected a JSON object")
    return value


def _read_logs(found: RunFacts) -> None:
    """Reads the warnings and errors of all ranks."""
    for path in sorted(found.root.glob("logs/rank-*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            match = _LINE.match(line)
            if not match:
                continue
            when, rank, level, text = match.groups()
            if level != "I":
                found.num_problems += 1
                if len(found.problems) < _MOST_LINES:
                    found.problems.append(f"{when} rank {rank}: {text}")
