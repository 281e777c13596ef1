"""The figures of a trained network on images of characters that no run has seen.

N images, D feature width, P pairs, C classes, B replicates. Errors are 1 - TAR (the share of genuine pairs rejected).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.rows_now import rows_now
from partial_fc.comm import SingleWorld
from partial_fc.data import open_source
from partial_fc.data.sample import still
from partial_fc.embedding.load import from_checkpoint
from partial_fc.evaluate.all_pairs import FALSE_ACCEPT_RATES, all_pairs
from partial_fc.evaluate.verification import fold_accuracy
from recipes.face.presets import PRESETS

CURVE_CLASSES = 1000  # of the points before the last
REPLICATES = 200
RESAMPLED = ("1e-5", "1e-6")
_COLLECTED = "3e-5"  # impostors with a higher rank than this are kept for the replicates
_BLOCK = 2048


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out images. trained: those in a typeface of training, the gallery; the others are the probes."""

    images: Sequence[Any]
    label_N: NDArray[np.int64]
    trained_N: NDArray[np.bool_]
    lookalike_P3: NDArray[np.int64] | None = None

    @classmethod
    def read(cls, folder: Path, trained: Sequence[bool] | None = None) -> "HeldOut":
        source, pairs = open_source(folder), folder / "lookalikes.npy"
        samples = [source.read(i) for i in range(len(source))]
        return cls(
            [still(sample) for sample in samples],
            np.array([sample.label for sample in samples]),
            np.ones(len(samples), np.bool_) if trained is None else np.array(trained),
            np.load(pairs) if pairs.exists() else None,
        )


def point(checkpoint: Path, held_out: HeldOut) -> dict[str, float]:
    """Returns the error at each FAR over all pairs of the first CURVE_CLASSES classes."""
    some_N = held_out.trained_N & (held_out.label_N < CURVE_CLASSES)
    row_ND = embed(checkpoint, [held_out.images[i] for i in np.flatnonzero(some_N).tolist()])
    found = all_pairs(row_ND, held_out.label_N[some_N], SingleWorld(), torch.device("cpu"), name="pairs")
    return {far: 1 - threshold.tar for far, threshold in found.at_far.items()}


def end(
    checkpoint: Path, held_out: HeldOut, table: str, seen: Path | None, original_C: NDArray[np.int64] | None
) -> dict[str, Any]:
    """Returns all figures of a finished run. table: of the head; seen: other drawings of the characters of its classes;
    original_C: the character of each class, if not its number."""
    every_ND = embed(checkpoint, held_out.images)
    row_ND, label_N = every_ND[held_out.trained_N], held_out.label_N[held_out.trained_N]
    rates = (*FALSE_ACCEPT_RATES, _COLLECTED)
    found = all_pairs(row_ND, label_N, SingleWorld(), torch.device("cpu"), name="pairs", rates=rates)
    figures: dict[str, Any] = {
        "num_genuine": found.num_genuine,
        "num_impostors": found.num_impostors,
        "error": {far: 1 - found.at_far[far].tar for far in FALSE_ACCEPT_RATES if far in found.at_far},
        "cosine": {far: threshold.cosine for far, threshold in found.at_far.items()},
    }
    if _COLLECTED in found.at_far:
        figures["replicates"] = replicates(row_ND, label_N, found.at_far[_COLLECTED].cosine)
    probe_ND = every_ND[~held_out.trained_N]
    if len(probe_ND):
        nearest_N = (torch.from_numpy(probe_ND) @ torch.from_numpy(row_ND).T).argmax(dim=1).numpy()
        figures["unseen_font_rank_1"] = float((label_N[nearest_N] == held_out.label_N[~held_out.trained_N]).mean())
    if held_out.lookalike_P3 is not None:
        a_P, b_P, same_P = held_out.lookalike_P3.T
        distance_P = np.square(every_ND[a_P] - every_ND[b_P], dtype=np.float64).sum(axis=1)
        figures["lookalikes"] = 1 - fold_accuracy(distance_P, same_P == 1).mean
    centre = rows_now(Checkpoint(checkpoint), table=table)
    centre_CD = normalize(centre.read(torch.arange(centre.start, centre.stop), ("centres",))["centres"].float())
    figures["nearest_centre"] = nearest_centres(centre_CD)
    if seen is not None:
        source = open_source(seen)
        samples = [source.read(i) for i in range(len(source))]
        row = torch.from_numpy(embed(checkpoint, [still(sample) for sample in samples]))
        target = torch.tensor([sample.label for sample in samples])
        figures["nll"] = nll(row, centre_CD, target, original_C, PRESETS["glyphs"]["scale"])
    return figures


def embed(checkpoint: Path, images: Sequence[Any]) -> NDArray[np.float32]:
    return from_checkpoint(Checkpoint(checkpoint)).model().embed(images)


def nll(
    row_ND: torch.Tensor, centre_CD: torch.Tensor, target_N: torch.Tensor,
    original_C: NDArray[np.int64] | None, scale: float,
) -> float:  # fmt: skip
    """Returns the mean negative log-likelihood of a full softmax without margin. original_C: the probabilities of the
    classes that a class was split into are added."""
    total = 0.0
    original = torch.arange(len(centre_CD)) if original_C is None else torch.from_numpy(original_C)
    for row_nD, target_n in zip(row_ND.split(_BLOCK), target_N.split(_BLOCK), strict=True):
        log_nC = (scale * row_nD @ centre_CD.T).double().log_softmax(dim=1)
        own_nC = original == target_n[:, None]
        total -= float(log_nC.masked_fill_(~own_nC, -torch.inf).logsumexp(dim=1).sum())
    return total / len(row_ND)


def nearest_centres(centre_CD: torch.Tensor) -> list[float]:
    """Returns the percentiles 0, 5, ..., 100 over classes of the cosine with the nearest other centre."""
    nearest = []
    for start in range(0, len(centre_CD), _BLOCK):
        cosine = centre_CD[start : start + _BLOCK] @ centre_CD.T
        cosine[torch.arange(len(cosine)), torch.arange(start, start + len(cosine))] = -1
        nearest.append(cosine.amax(dim=1))
    return [round(float(value), 6) for value in torch.cat(nearest).double().quantile(torch.linspace(0, 1, 21).double())]


def replicates(
    row_ND: NDArray[np.float32], label_N: NDArray[np.int64], floor: float,
    rates: Sequence[str] = RESAMPLED, number: int = REPLICATES,
) -> dict[str, list[float]]:  # fmt: skip
    """Returns the errors at FARs for a number of sets of characters, drawn with replacement from these.

    Replicate b draws the same characters in every run, so that differences of runs can be resampled. Two copies of a
    character form no pairs. floor: a cosine that more than the largest rate's share of the impostors exceeds.
    """
    order = np.argsort(label_N, kind="stable")
    unit, label = torch.from_numpy(row_ND[order]), label_N[order]
    kept: list[tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]] = []
    for i in range(0, len(label), _BLOCK):
        for j in range(i, len(label), _BLOCK):
            cosine = (unit[i : i + _BLOCK] @ unit[j : j + _BLOCK].T).numpy()
            a, b = label[i : i + _BLOCK, None], label[None, j : j + _BLOCK]
            wanted = (a == b) | (cosine > floor)
            if i == j:
                wanted = np.triu(wanted, 1)
            x, y = np.nonzero(wanted)
            kept.append((cosine[x, y], a[x, 0], b[0, y], a[x, 0] == b[0, y]))
    cosine, first, second, same = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    down = np.argsort(-cosine[~same], kind="stable")
    wrong, left, right = cosine[~same][down], first[~same][down], second[~same][down]
    genuine, own = cosine[same], first[same]
    count_C = np.bincount(label)
    errors: dict[str, list[float]] = {far: [] for far in rates}
    for replicate in range(number):
        weight_C = np.bincount(_draw(replicate, len(count_C)), minlength=len(count_C))
        images = weight_C * count_C
        # All pairs of images, without those of one character and of its copies.
        total = (float(images.sum()) ** 2 - float(np.square(images).sum())) / 2
        cumulative = np.cumsum(weight_C[left] * weight_C[right])
        for far in rates:
            allowed = int(np.searchsorted(cumulative, float(far) * total, side="right"))
            bound = wrong[min(allowed, len(wrong) - 1)]
            rejected = weight_C[own] * (genuine <= bound)
            errors[far].append(round(float(rejected.sum() / weight_C[own].sum()), 8))
    return errors


def _draw(replicate: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng((7, replicate)).integers(0, count, count)
