"""Reading what a run has written down: loss.csv and history.jsonl. Needs no torch."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.files import check_regular

_GOES_BACK = ("start", "back")


@dataclass
class History:
    """The rows of history.jsonl that count: what was done again, or after a checkpoint that the run went back to, is
    left out. starts: all of them."""

    starts: list[dict[str, Any]] = field(default_factory=list)
    scalars: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    num_backs: int = 0
    ended: str = ""  # "end", "stopped", or nothing: it is under way, or was killed

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a scalar; where there is none (NaN) it is left out."""
        return [(row["step"], row[name]) for row in self.scalars if row.get(name) is not None]

    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """(step, score) by evaluated set."""
        found: dict[str, list[tuple[int, float]]] = {}
        for row in self.evaluations:
            for name, score in row["scores"].items():
                if score is not None:
                    found.setdefault(name, []).append((row["step"], score))
        return found


def read_history(models_root: Path) -> History:
    """Of a run that has none, an empty one. Lines that a full disk or a lost machine has cut are left out."""
    found = History()
    path = models_root / "history.jsonl"
    if not path.exists():
        return found
    check_regular(path)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            step, event = int(row["step"]), row.get("event")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
        if event in _GOES_BACK:
            found.scalars = [one for one in found.scalars if one["step"] <= step]
            found.evaluations = [one for one in found.evaluations if one["step"] <= step]
            found.num_backs += event == "back"
        found.ended = event if event in ("end", "stopped") else ""
        if event == "start":
            found.starts.append(row)
        elif event == "evaluation" and isinstance(row.get("scores"), dict):
            found.evaluations.append(row)
        elif event is None:
            found.scalars.append(row)
    return found


def read_losses(models_root: Path) -> NDArray[np.float64]:
    """(steps, 3): step, loss, learning rate. Rows that are not whole are left out."""
    path = models_root / "loss.csv"
    if not path.exists():
        return np.zeros((0, 3))
    check_regular(path)
    rows = path.read_bytes().splitlines()[1:]
    whole = [row for row in rows if row.count(b",") == 2 and not row.endswith(b",") and b"\0" not in row]
    if not whole:
        return np.zeros((0, 3))
    try:
        return np.loadtxt(whole, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; expected a step, a loss and a learning rate a line") from None


def thinned(row_N3: NDArray[np.float64], num_points: int = 300) -> NDArray[np.float64]:
    """(points, 5): step, mean loss, smallest, largest, learning rate of at most so many equal parts of the curve. What
    is not finite is left out."""
    row_N3 = row_N3[np.isfinite(row_N3[:, 1])]
    size = -(-len(row_N3) // num_points)
    parts = [row_N3[start : start + size] for start in range(0, len(row_N3), size or 1)]
    return np.array(
        [(p[-1, 0], p[:, 1].mean(), p[:, 1].min(), p[:, 1].max(), p[-1, 2]) for p in parts], dtype=np.float64
    ).reshape(-1, 5)
