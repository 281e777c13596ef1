"""Verification on pairs (1:1), as on LFW: do two images show the same class?

N pairs of the set, M different images, I images of one batch, T thresholds, F folds.

LFW's ten-fold protocol (Huang et al., 2007) as InsightFace computes it: embeddings of length 1
(embedding/model.py); squared distance; thresholds 0, 0.01 ... 3.99; the folds are consecutive blocks of pairs,
each judged by the best threshold of the other nine.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from partial_fc import terminal
from partial_fc.comm import World, all_or_raise
from partial_fc.data import BadRecord
from partial_fc.data.decode import decode, fit
from partial_fc.data.pairs import read_pairs
from partial_fc.embedding.images import Pixels, batches, black
from partial_fc.embedding.model import unit_embeddings
from partial_fc.evaluate.evaluation import Forward, own_part
from partial_fc.evaluate.roc import Roc, plot

NUM_FOLDS = 10
_AT_ONCE = 64  # images that are decoded to check them
THRESHOLDS = np.arange(0, 4, 0.01)
_log = logging.getLogger(__name__)
FALSE_ACCEPT_RATES = ("1e-3", "1e-4", "0")


@dataclass(frozen=True)
class Accuracy:
    """Fractions of the pairs. std is over the folds (population); low and high bound the mean with 95 %."""

    mean: float
    std: float
    low: float
    high: float


class Verification:
    """One verification file (.bin of pairs), evaluated by all ranks together."""

    def __init__(self, path: Path, image_size: int, batch_size: int, flip: bool = True, name: str = ""):
        """Reads the file without decoding images. batch_size: images per forward. flip: of `unit_embeddings`. name: by
        default the file's. Raises ValueError for a file that cannot be evaluated."""
        self.path = Path(path)
        self.name = name or self.path.stem
        self.image_size = image_size
        self.batch_size = batch_size
        self.flip = flip
        self.roc: Roc | None = None  # of the latest run, as is distance_N, of the pairs in file order
        self.distance_N = np.empty(0)
        self.row_MD = np.empty((0, 0))  # likewise, the embeddings of its images, of length 1
        images, self.same_N = read_pairs(self.path)
        # An image that stands in several pairs, as most of LFW's and CFP's do, is computed once.
        number = {image: i for i, image in enumerate(dict.fromkeys(images))}
        self.file_M = list(number)
        self.pair_N2 = np.array([number[image] for image in images]).reshape(-1, 2)
        check_pairs(self.path, self.same_N)

    def check(self, world: World) -> None:
        """Decodes all images, each rank its part. Raises ValueError, on all ranks alike, with the first unusable one: a
        training would meet it in each evaluation. A collective."""

        def decode_own() -> None:
            own = own_part(len(self.file_M), world)
            for batch, (_, bad) in enumerate(batches(own, self._read, black(self.image_size), _AT_ONCE)):
                for i, error in bad.items():
                    image = self.pair_N2.ravel().tolist().index(own[batch * _AT_ONCE + i])
                    raise ValueError(f"pair {image // 2}, image {image} cannot be used: {error}")

        all_or_raise(decode_own, world, "evaluate/check", f"the verification set {self.path} cannot be used")

    def run(self, embed: Forward, world: World) -> Iterator[tuple[str, float]]:
        """Yields ("NAME/accuracy", ...) and so on; see `Evaluation.run`. embed: uint8 RGB images (I, 3, H, W) on the
        host -> embeddings (I, D), on any device, not normalised.

        accuracy, accuracy_std: ten folds. accuracy_low, accuracy_high: its 95 % interval. tar@far=X: true accept rate
        at false accept rate X over the whole set, see `Roc.tar_at`. xnorm: mean length of the network's outputs.

        One collective: an all-gather of 8 (D + 1) bytes an image. Raises ValueError, on all ranks alike, for an
        unusable image or a NaN or Inf embedding.
        """
        # The gathered rows are in file order. Batches and results are bit-identical for any number of ranks.
        size, num_images = self.batch_size, len(self.file_M)
        own = own_part(math.ceil(num_images / size), world)
        images = range(own.start * size, min(own.stop * size, num_images))
        read = batches(images, self._read, black(self.image_size), size)
        rows = [torch.empty(0, dtype=torch.float64)]  # flat: a rank without images does not know D
        shown = world.rank == 0
        bar = terminal.bar(total=len(images), desc=self.name, unit="image", shown=shown, leave=False)
        with torch.no_grad(), bar:
            for image_I3HW, bad in read:
                unit_ID, norm_I = unit_embeddings(embed, image_I3HW, self.flip)
                # Not raised here: the other ranks would wait for this one. `_check` raises it on all ranks.
                unit_ID[list(bad)] = torch.nan
                rows.append(torch.cat((unit_ID, norm_I[:, None]), dim=1).ravel())
                bar.update(len(image_I3HW))
        row_ME = world.all_gather(torch.cat(rows), name=f"evaluate/{self.name}").numpy().reshape(num_images, -1)
        distance_N = distances(row_ME[:, :-1], row_ME[:, :-1], self.pair_N2)
        self._check(distance_N)
        self.row_MD = row_ME[:, :-1]

        self.distance_N = distance_N
        accuracy = fold_accuracy(distance_N, self.same_N)
        self.roc = Roc.from_distances(distance_N, self.same_N, accuracy.mean)
        yield from accuracy_values(self.name, accuracy)
        for far in FALSE_ACCEPT_RATES:
            yield f"{self.name}/tar@far={far}", self.roc.tar_at(float(far))
        yield f"{self.name}/xnorm", float(row_ME[self.pair_N2, -1].mean())

    def _read(self, image: int) -> Pixels:
        return fit(decode(self.file_M[image]), self.image_size)

    def _check(self, distance_N: np.ndarray) -> None:
        bad = np.flatnonzero(~np.isfinite(distance_N))
        if not len(bad):
            return
        pair = int(bad[0])
        where = f"{self.path}: pair {pair} of {len(self.same_N)} ({len(bad)} bad in all)"
        for image in (2 * pair, 2 * pair + 1):
            try:
                self._read(self.pair_N2.flat[image])
            except BadRecord as error:
                raise ValueError(f"{where}: image {image} cannot be used: {error}") from error
        raise ValueError(
            f"{where}: an embedding has NaN or Inf, or length 0; the network has "
            "diverged, or `embed` returns something else"
        )


class Verifications:
    """Several sets as one Evaluation: arcface_torch's three lines for each, one roc.png, and the mean accuracy as the
    score."""

    board = "verification/"

    def __init__(self, sets: Sequence[Verification]):
        self.sets = sets

    def run(self, forward: Forward, world: World) -> Iterator[tuple[str, float]]:
        for one in self.sets:
            yield from one.run(forward, world)

    def scores(self, values: Mapping[str, float]) -> dict[str, float]:
        return {one.name: values[f"{one.name}/accuracy"] for one in self.sets}

    def lines(self, step: int, epoch: float, values: Mapping[str, float], best: Mapping[str, float]) -> list[str]:
        found = []
        for name in (one.name for one in self.sets):
            accuracy, std = values[f"{name}/accuracy"], values[f"{name}/accuracy_std"]
            found += [
                f"[{name}][{step}]XNorm: {values[f'{name}/xnorm']:f}",
                f"[{name}][{step}]Accuracy-Flip: {accuracy:1.5f}+-{std:1.5f}",
                f"[{name}][{step}]Accuracy-Highest: {best[name]:1.5f}",
            ]
        return found

    def draw(self, folder: Path) -> None:
        """Draws roc.png, with the curves of all sets."""
        curves = {one.name: one.roc for one in self.sets if one.roc is not None}
        if curves:
            plot(curves, folder / "roc.png")


def distances(row_MD: np.ndarray, other_MD: np.ndarray, pair_N2: np.ndarray) -> np.ndarray:
    """Returns the squared distances of pairs, the first of each from row_MD, the second from other_MD: float64 (N,)."""
    difference_ND = (row_MD[pair_N2[:, 0]] - other_MD[pair_N2[:, 1]]).astype(np.float64)
    return np.einsum("nd,nd->n", difference_ND, difference_ND)


def accuracy_values(name: str, accuracy: Accuracy) -> Iterator[tuple[str, float]]:
    yield f"{name}/accuracy", accuracy.mean
    yield f"{name}/accuracy_std", accuracy.std
    yield f"{name}/accuracy_low", accuracy.low
    yield f"{name}/accuracy_high", accuracy.high


def check_pairs(path: Path, same_N: np.ndarray, folds: int = NUM_FOLDS) -> None:
    """Raises ValueError for pairs that do not split into these folds. Warns of folds of one kind of pair."""
    if len(same_N) < folds:
        raise ValueError(f"{path}: {len(same_N)} pairs; {folds} folds need at least {folds}")
    if same_N.all() or not same_N.any():
        raise ValueError(f"{path}: all {len(same_N)} pairs are of one kind; both kinds are needed")
    if one_kind := sum(bool(of_fold.all() or not of_fold.any()) for of_fold in np.array_split(same_N, folds)):
        _log.warning(
            "%s: %d of its %d folds (consecutive parts) have one kind of pair, so the accuracy means little: mix both "
            "kinds in each fold", path, one_kind, folds,
        )  # fmt: skip


def fold_accuracy(distance_N: np.ndarray, same_N: np.ndarray, num_folds: int = NUM_FOLDS) -> Accuracy:
    """Returns the accuracy over folds (ten) of "same if squared distance < threshold".

    distance_N: float64 in [0, 4], same_N: bool, in file order; N >= num_folds. The smallest of equally good thresholds
    counts.
    """
    # Consecutive pairs; the first N % F folds are one pair longer.
    folds = list(zip(np.array_split(distance_N, num_folds), np.array_split(same_N, num_folds), strict=True))
    correct_FT = np.stack(
        [_below(distance_n[same_n]) + (~same_n).sum() - _below(distance_n[~same_n]) for distance_n, same_n in folds]
    )
    best_F = np.argmax(correct_FT.sum(axis=0) - correct_FT, axis=1)
    accuracy_F = correct_FT[np.arange(num_folds), best_F] / [len(same_n) for _, same_n in folds]
    mean = float(accuracy_F.mean())
    return Accuracy(mean, float(accuracy_F.std()), *wilson_interval(mean, len(same_N)))


def _below(distance_n: np.ndarray) -> np.ndarray:
    """Returns how many distances are below each threshold, (T,)."""
    return np.searchsorted(np.sort(distance_n), THRESHOLDS)


def wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval (1927) for a fraction observed in `count` independent trials."""
    z = 1.959964
    shrink = 1 + z**2 / count
    centre = (fraction + z**2 / (2 * count)) / shrink
    half = z / shrink * math.sqrt(fraction * (1 - fraction) / count + z**2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)
