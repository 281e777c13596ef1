"""Receiver operating characteristic of a set of pairs: the true accept rate (TAR) at each false accept rate (FAR).

N pairs, K distinct distances.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from partial_fc.accessories import import_matplotlib

_FARTHEST = 4.0  # squared distance of two vectors of length 1


@dataclass(frozen=True)
class Threshold:
    """The rule "the same if the squared distance is at most `distance`", which is "if the cosine is at least `cosine`",
    and its rates on the pairs that it was chosen on."""

    distance: float
    cosine: float
    accuracy: float
    tar: float
    far: float


@dataclass(frozen=True)
class Roc:
    """The exact curve: one point for each distinct distance in the set, no grid of thresholds.

    Point k accepts the pairs at most threshold[k] apart, point 0 none. far and tar never fall.
    """

    far: np.ndarray  # (K + 1,) float64: accepted impostor pairs / impostor pairs
    tar: np.ndarray  # (K + 1,) float64: accepted genuine pairs / genuine pairs
    threshold: np.ndarray  # (K + 1,) float64: squared distance; -inf at point 0
    num_genuine: int
    num_impostors: int
    accuracy: float | None  # of the same pairs, for the legend; the caller computes it

    @classmethod
    def from_distances(cls, distance_N: np.ndarray, same_N: np.ndarray, accuracy: float | None) -> "Roc":
        """Builds the curve. distance_N: finite. same_N: True for a genuine pair; both kinds must occur (ValueError)."""
        num_genuine = int(same_N.sum())
        num_impostors = len(same_N) - num_genuine
        if not num_genuine or not num_impostors:
            raise ValueError(f"a ROC needs genuine and impostor pairs; got {num_genuine} and {num_impostors} of them")
        order = np.argsort(distance_N, kind="stable")
        distance_N = distance_N[order]
        # Ties are accepted together: a point only before a larger distance.
        last = np.append(np.flatnonzero(np.diff(distance_N)), len(distance_N) - 1)
        accepted_genuine = np.cumsum(same_N[order])[last]
        accepted_impostors = last + 1 - accepted_genuine
        return cls(
            far=np.append(0.0, accepted_impostors / num_impostors),
            tar=np.append(0.0, accepted_genuine / num_genuine),
            threshold=np.append(-np.inf, distance_N[last]),
            num_genuine=num_genuine,
            num_impostors=num_impostors,
            accuracy=accuracy,
        )

    def tar_at(self, far: float) -> float:
        """Returns the largest TAR at which FAR is at most `far`; NaN if the set is too small, see threshold_at."""
        point = self._point(far)
        return float("nan") if point is None else float(self.tar[point])

    def best(self) -> Threshold:
        """Returns the threshold with the most correct decisions; the strictest of equally good ones."""
        right = self.tar * self.num_genuine + (1 - self.far) * self.num_impostors
        return self._threshold(int(np.argmax(right.round())))  # integers, so that ties compare equal

    def threshold_at(self, far: float) -> Threshold | None:
        """Returns the loosest threshold with FAR of at most `far`; None if 0 < far < 1 / num_impostors, too small to
        tell."""
        point = self._point(far)
        return None if point is None else self._threshold(point)

    def _point(self, far: float) -> int | None:
        if 0 < far < 1 / self.num_impostors:
            return None
        return int(np.searchsorted(self.far, far, side="right")) - 1

    def _threshold(self, point: int) -> Threshold:
        # Half-way to the next distance: far from pairs that the last bits of an embedding would change.
        bounds = np.append(self.threshold.clip(min=0), _FARTHEST)
        distance = float(bounds[point : point + 2].mean())
        tar, far = float(self.tar[point]), float(self.far[point])
        right = tar * self.num_genuine + (1 - far) * self.num_impostors
        return Threshold(distance, 1 - distance / 2, right / (self.num_genuine + self.num_impostors), tar, far)


def plot(curves: Mapping[str, Roc], path: Path) -> None:
    """Draws the ROCs of several sets, by name, into one PNG, with their accuracies in the legend.

    A curve starts at FAR = 1 / num_impostors, the smallest that its set can measure.
    """
    if not curves:
        raise ValueError("no ROC to plot: expected at least one verification set")
    figure = import_matplotlib().figure.Figure(figsize=(8, 6), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    smallest_far = min(1 / roc.num_impostors for roc in curves.values())
    for name, roc in curves.items():
        first_far = 1 / roc.num_impostors
        far = np.append(first_far, roc.far[roc.far > first_far])
        tar = np.append(roc.tar_at(first_far), roc.tar[roc.far > first_far])
        accuracy = "" if roc.accuracy is None else f": accuracy {roc.accuracy:.2%}"
        label = f"{name}, {roc.num_genuine + roc.num_impostors:,} pairs{accuracy}"
        axes.plot(far, tar, drawstyle="steps-post", label=label)
    lowest_tar = min(roc.tar_at(1 / roc.num_impostors) for roc in curves.values())
    axes.set(
        xscale="log",
        xlim=(smallest_far, 1.0),
        ylim=(max(0.0, np.floor(lowest_tar * 20) / 20 - 0.05), 1.005),
        xlabel="false accept rate (FAR)",
        ylabel="true accept rate (TAR)",
        title="Verification",
    )
    axes.grid(which="major", color="0.8")
    axes.grid(which="minor", color="0.93")
    axes.legend(loc="lower right")
    figure.savefig(path, format="png")
