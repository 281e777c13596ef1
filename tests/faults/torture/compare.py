"""Comparison of a disturbed run with an undisturbed one by their files: losses, positions, checkpoints."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from partial_fc.checkpoint.folders import MANIFEST, newest
from partial_fc.train.record.curve import read_losses, read_scalars

# loss.csv has nine digits, which limits the comparison.
_NINE_DIGITS = 1e-8


@dataclass(frozen=True)
class Comparison:
    steps: int
    """Of the undisturbed run."""
    differing: int
    """Steps whose losses differ in loss.csv's nine digits by more than the last."""
    in_full: int
    """Steps that both runs have logged (--frequent), with the loss in fp32 and the position in the data."""
    largest_difference: float
    """Relative, of those; of the nine digits where none is logged by both."""
    problems: tuple[str, ...]
    """Steps missing or twice, samples lost or repeated, another position at the end."""

    def equal(self, tolerance: float) -> bool:
        in_nine = self.in_full == self.steps or not self.differing
        return not self.problems and in_nine and self.largest_difference <= tolerance


def compare(undisturbed: Path, disturbed: Path) -> Comparison:
    """Compares two runs. Raises ValueError if the undisturbed run has no losses."""
    whole, other = read_losses(undisturbed), read_losses(disturbed)
    if not len(whole):
        raise ValueError(f"{undisturbed / 'loss.csv'} has no losses: nothing to compare with")
    problems = []
    steps = other[:, 0].astype(int).tolist()
    if steps != list(range(1, len(whole) + 1)):
        missing = len(set(range(1, len(whole) + 1)) - set(steps))
        problems.append(f"loss.csv has {len(steps)} rows for {len(whole)} steps: {missing} missing, or out of order")
    common = min(len(whole), len(other))
    nine = _relative(whole[:common, 1], other[:common, 1])
    full = _in_full(undisturbed), _in_full(disturbed)
    both = sorted(full[0].keys() & full[1].keys())
    losses = np.array([[one[step][0] for step in both] for one in full]).reshape(2, -1)
    moved = [step for step in both if full[0][step][1] != full[1][step][1]]
    if moved:
        problems.append(
            f"samples were lost or repeated: at step {moved[0]} the data stood at epoch {full[1][moved[0]][1]}, "
            f"undisturbed at {full[0][moved[0]][1]} ({len(moved)} such steps)"
        )
    problems += _ends(undisturbed, disturbed)
    differences = _relative(*losses) if both else nine
    return Comparison(
        steps=len(whole),
        differing=int((nine > _NINE_DIGITS).sum()),
        in_full=len(both),
        largest_difference=float(differences.max(initial=0.0)),
        problems=tuple(problems),
    )


def _relative(a: Any, b: Any) -> Any:
    """Returns the relative difference; infinite if only one is NaN."""
    difference = np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(float).tiny)
    return np.where(np.isnan(a) & np.isnan(b), 0.0, np.where(np.isnan(difference), np.inf, difference))


def _in_full(root: Path) -> dict[int, tuple[float, float]]:
    """Returns step -> (loss, position in epochs), as TensorBoard has them."""
    scalars = read_scalars(root)
    epochs = dict(scalars.get("train/epoch", []))
    return {step: (loss, epochs[step]) for step, loss in scalars.get("train/loss", []) if step in epochs}


def _ends(undisturbed: Path, disturbed: Path) -> list[str]:
    """Compares the data positions of the last checkpoints."""
    last = [folder for root in (undisturbed, disturbed) if (folder := newest(root / "checkpoints"))]
    if len(last) < 2:
        return []
    facts = [json.loads((folder / MANIFEST).read_text()) for folder in last]
    return [
        f"{name} of the last checkpoint is {facts[1].get(name)}, undisturbed {facts[0].get(name)}"
        for name in ("step", "position", "left_out")
        if facts[0].get(name) != facts[1].get(name)
    ]
