"""Differences between the arms of a study, paired by seed, with intervals and tests."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from .cells import Cell

Values = NDArray[np.float64]
MEASURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "FAR 1e-4": lambda figures: figures["error"]["1e-4"],
    "FAR 1e-5": lambda figures: figures["error"]["1e-5"],
    "FAR 1e-6": lambda figures: figures["error"]["1e-6"],
    "unseen typeface": lambda figures: 1 - figures["unseen_font_rank_1"],
    "look-alikes": lambda figures: figures["lookalikes"],
    "NLL": lambda figures: figures["nll"],
}
MAIN = "FAR 1e-5"
FEWEST = 3  # seeds of an interval


@dataclass(frozen=True)
class Results:
    """All results by (cell, seed)."""

    by_run: dict[tuple[Cell, int], dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """Raises ValueError if runs of one set were of different data."""
        found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        by_run = {(Cell.parse(one["cell"]), one["seed"]): one for one in found}
        data: dict[str, str] = {}
        for (cell, seed), one in by_run.items():
            if data.setdefault(cell.set, one["made_by"]["data"]) != one["made_by"]["data"]:
                raise ValueError(f"{cell} {seed}: its data are not those of the other runs of {cell.set}")
        return cls(by_run)

    def seeds(self, *cells: Cell) -> list[int]:
        """Returns the seeds that all of these cells have."""
        return sorted(set.intersection(*({seed for at, seed in self.by_run if at == cell} for cell in cells)))

    def log(self, cell: Cell, seeds: Sequence[int], measure: str = MAIN) -> Values:
        """Returns the logarithm of a measure for each seed."""
        value = np.array([MEASURES[measure](self.by_run[cell, seed]["figures"]) for seed in seeds])
        if (value <= 0).any():
            seed = seeds[int((value <= 0).argmax())]
            raise ValueError(f"{cell}, seed {seed}: {measure} is 0, which has no logarithm")
        return np.log(value)

    def difference(self, cell: Cell, other: Cell, measure: str = MAIN) -> Values:
        """Returns the difference of logarithms, paired by seed."""
        seeds = self.seeds(cell, other)
        return self.log(cell, seeds, measure) - self.log(other, seeds, measure) if seeds else np.empty(0)

    def minutes(self, *cells: Cell) -> dict[str, float]:
        """Returns the median minutes of their trainings by the kind of GPU, or else the processor's instructions."""
        seconds: dict[str, list[int]] = {}
        for (cell, _), run in self.by_run.items():
            if cell in cells:
                kind = run["made_by"].get("gpu", run["made_by"]["instructions"])
                seconds.setdefault(kind, []).append(run["made_by"]["train_s"])
        return {kind: median(found) / 60 for kind, found in sorted(seconds.items())}


# ---- statistics


def interval(value: Values) -> tuple[float, float]:
    """Returns Student's 95 % interval of the mean; NaN for less than FEWEST values. Of logarithms it is symmetric about
    the geometric mean of a ratio. (BCa of three to seven normal values covers the mean in 72 to 89 %: docs/log.md.)"""
    if len(value) < FEWEST:
        return float("nan"), float("nan")
    half = stats.t.ppf(0.975, len(value) - 1) * value.std(ddof=1) / np.sqrt(len(value))
    return float(value.mean() - half), float(value.mean() + half)


def sign_flip(value: Values) -> float:
    """Returns the exact one-sided p of "the mean is not below 0": the share of all 2^n sign patterns whose mean is at
    most the observed one."""
    patterns = np.array(list(product((1, -1), repeat=len(value))))
    return float(((patterns * value).mean(axis=1) <= value.mean() + 1e-15).mean())


def holm(p: dict[str, float]) -> dict[str, float]:
    """Returns p adjusted for their number (Holm, 1979)."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        adjusted[name] = largest
    return adjusted


def characters(results: Results, cell: Cell, other: Cell, far: str) -> tuple[float, float]:
    """Returns the 95 % interval of the mean difference over resampled characters, seeds as they are."""
    seeds = results.seeds(cell, other)
    errors = [[results.by_run[at, seed]["figures"]["replicates"][far] for seed in seeds] for at in (cell, other)]
    ratio_B = (np.log(errors[0]) - np.log(errors[1])).mean(axis=0)
    low, high = np.quantile(ratio_B, (0.025, 0.975))
    return float(low), float(high)


# ---- tables


def errors(results: Results, cells: Sequence[tuple[Cell, str]]) -> Iterator[str]:
    """Yields a table of the measures of cells, each with its name: means over the seeds, with their standard deviation
    in percent of them."""
    shown = [(name, of) for name, of in MEASURES.items() if any(_has(of, one) for one in results.by_run.values())]
    yield f"| | n | {' | '.join(name for name, _ in shown)} | minutes |"
    yield "|" + " --- |" * (3 + len(shown))
    for cell, name in cells:
        runs = [run for (at, _), run in results.by_run.items() if at == cell]
        if runs:
            columns = [_mean([of(run["figures"]) for run in runs]) if _has(of, runs[0]) else "" for _, of in shown]
            minutes = ", ".join(f"{value:.1f} {kind}" for kind, value in results.minutes(cell).items())
            yield f"| {name} | {len(runs)} | {' | '.join(columns)} | {minutes} |"


def _has(of: Callable[[dict[str, Any]], float], run: dict[str, Any]) -> bool:
    try:
        of(run["figures"])
    except KeyError:
        return False
    return True


def _mean(values: Sequence[float]) -> str:
    value = np.array(values)
    spread = f" ± {value.std(ddof=1) / value.mean():.1%}".replace("%", " %") if len(value) > 1 else ""
    return f"{value.mean():.3g}{spread}"


def ratio(results: Results, cell: Cell, other: Cell, measure: str = MAIN) -> str:
    """Returns the geometric mean of the ratio of two cells' errors, with its intervals over seeds and over characters;
    empty if no seed has both."""
    difference = results.difference(cell, other, measure)
    if not len(difference):
        return ""
    text = f"{np.exp(difference.mean()):.3f} ("
    if len(difference) >= FEWEST:
        low, high = np.exp(interval(difference))
        text += f"{low:.3f} to {high:.3f}, "
    text += f"n {len(difference)}"
    far = measure.removeprefix("FAR ")
    if far in results.by_run[cell, results.seeds(cell)[0]]["figures"].get("replicates", {}):
        low, high = np.exp(characters(results, cell, other, far))
        text += f"; characters {low:.3f} to {high:.3f}"
    return text + ")"


# ---- hypotheses


@dataclass(frozen=True)
class Hypothesis:
    """values: one array for each part of it, of which all have to hold: a number for each seed, whose mean is below 0
    if the part holds; empty arrays: not run yet."""

    name: str
    sentence: str
    values: Sequence[Values]


def verdicts(hypotheses: Sequence[Hypothesis], level: float) -> Iterator[str]:
    """Yields a table with exact p of each and Holm's for all; one that was not run counts with p = 1."""
    # All parts have to hold, so the largest p counts (two one-sided tests; intersection-union).
    p = {one.name: max(map(sign_flip, one.values)) if len(one.values[0]) else 1.0 for one in hypotheses}
    adjusted = holm(p)
    yield "| hypothesis | n | means (below 0: it holds) | exact p | Holm's p | |"
    yield "|" + " --- |" * 6
    for one in hypotheses:
        if not len(one.values[0]):
            yield f"| {one.name}: {one.sentence} | 0 | | | | not run yet |"
            continue
        means = ", ".join(f"{value.mean():+.4f}" for value in one.values)
        verdict = "holds" if adjusted[one.name] <= level else "not shown"
        last = f"{p[one.name]:.4f} | {adjusted[one.name]:.4f} | {verdict}"
        yield f"| {one.name}: {one.sentence} | {len(one.values[0])} | {means} | {last} |"
