"""All pairs of a labelled set (1:1): the true accept rate (TAR) at false accept rates (FAR) beyond any list of pairs.

N images, D feature width, B and b images of two blocks, K scores kept, R rates.

Each two images are a pair once. Pairs are scored block by block and never stored: a first pass keeps the K highest
scores of impostors; a second one, over blocks with genuine pairs, counts those above each rate's bound.

A score is 1 - squared distance / 2, the cosine, and exact: embeddings are rounded to multiples of 2^-26 (float32's
precision at 1/8), so that every part of a product is a multiple of 2^-52 below 2, which float64 holds. Blocks, ranks
and threads change no bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc import terminal
from partial_fc.comm import World
from partial_fc.evaluate.roc import Threshold

FALSE_ACCEPT_RATES = ("1e-4", "1e-5", "1e-6")
_BLOCK = 1024  # images; the scores of two blocks are 8 MB
_PER_UNIT = 2.0**26


@dataclass(frozen=True)
class AllPairs:
    """The results, equal on every rank and for any number of them. at_far: the loosest threshold with a FAR of at most
    the rate, as Roc.threshold_at; without rates below 1 / num_impostors, too small to tell."""

    num_genuine: int
    num_impostors: int
    at_far: dict[str, Threshold]


def all_pairs(
    row_ND: NDArray[np.float32],
    label_N: NDArray[np.int64],
    world: World,
    device: torch.device,
    *,
    name: str,
    rates: Sequence[str] = FALSE_ACCEPT_RATES,
    gallery_ND: NDArray[np.float32] | None = None,
) -> AllPairs:
    """Measures all pairs; equal labels are genuine. Every rank gives the same rows, of length 1, and computes every
    W-th block. rates: FARs in [0, 1), as text. gallery_ND: the second image of a pair by another model, of the same
    width; the first of a pair has the smaller label, or comes earlier in the data.

    Memory beside the rows: 100 MB, and 16 bytes for each impostor that the largest rate accepts. Two collectives, the
    larger one of 8 bytes for each such impostor and rank. Raises ValueError if there are no pairs of one kind.
    """
    classes, place_N, count_C = np.unique(label_N, return_inverse=True, return_counts=True)
    num_genuine = int((count_C * (count_C - 1) // 2).sum())
    num_impostors = len(label_N) * (len(label_N) - 1) // 2 - num_genuine
    if not num_genuine or not num_impostors:
        why = "all of one class" if len(classes) < 2 else "none of the same class as another"
        raise ValueError(f"{name}: {len(label_N)} images, {why}; expected classes, at least one of several images")
    allowed = {far: _allowed(float(far), num_impostors) for far in rates if not 0 < float(far) < 1 / num_impostors}
    if not allowed:
        return AllPairs(num_genuine, num_impostors, {})

    gallery_ND = row_ND if gallery_ND is None else gallery_ND
    pairs = _Pairs(row_ND, gallery_ND, np.argsort(place_N, kind="stable"), np.sort(place_N), device)
    top_K = pairs.highest_impostors(max(allowed.values()) + 1, world, name)
    # Above the first impostor too many: of equal scores all or none are accepted.
    bounds = {far: float(top_K[number]) for far, number in allowed.items()}
    found = pairs.genuine_above(list(bounds.values()), world, name)
    at_far = {}
    for (far, bound), (right, nearest) in zip(bounds.items(), found, strict=True):
        wrong_k = top_K[top_K > bound]
        # Half-way from the bound to the nearest accepted pair, as a Roc's.
        cosine = (bound + min([nearest, *wrong_k[-1:].tolist()])) / 2
        accuracy = (right + num_impostors - len(wrong_k)) / (num_genuine + num_impostors)
        at_far[far] = Threshold(2 - 2 * cosine, cosine, accuracy, right / num_genuine, len(wrong_k) / num_impostors)
    return AllPairs(num_genuine, num_impostors, at_far)


def _allowed(far: float, num_impostors: int) -> int:
    """Returns the largest number of impostors that is at most a part `far` of all."""
    number = round(far * num_impostors)
    return number - int(number / num_impostors > far)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Images in the order of their classes, place_N: i < j are a genuine pair if place i == place j, impostors if
    place i < place j. Blocks are named by their first image."""

    row_ND: NDArray[np.float32]
    gallery_ND: NDArray[np.float32]
    order_N: NDArray[np.int64]
    place_N: NDArray[np.int64]
    device: torch.device

    def highest_impostors(self, count: int, world: World, name: str) -> Tensor:
        """Returns the `count` highest scores of impostors, the highest first, on the CPU. A collective."""
        starts = range(0, len(self.place_N), _BLOCK)
        own = [(i, j) for i in starts for j in starts if i <= j][world.rank :: world.size]
        # One buffer, as pieces that stay would scatter the large blocks over memory.
        kept = torch.empty(2 * count + _BLOCK**2, dtype=torch.float64, device=self.device)
        num_kept, floor = 0, -torch.inf
        for i, j in terminal.bar(own, desc=name, unit="block", shown=world.rank == 0, leave=False):
            score = self.scores(i, j)
            if self._are_mixed(i, j):
                score.masked_fill_(self._place(i)[:, None] >= self._place(j), -torch.inf)
            high = score[score > floor]
            kept[num_kept : num_kept + len(high)] = high
            num_kept += len(high)
            if num_kept > 2 * count:
                kept[:count] = kept[:num_kept].topk(count)[0]
                num_kept, floor = count, float(kept[count - 1])
        top = world.all_gather(kept[:num_kept].cpu(), name=f"evaluate/{name}/impostors")
        return top.topk(count)[0]

    def genuine_above(self, bounds: Sequence[float], world: World, name: str) -> list[tuple[int, float]]:
        """Returns for each bound the number of genuine pairs above it and the lowest such score, 1 if there are none. A
        collective."""
        starts = range(0, len(self.place_N), _BLOCK)
        own = [(i, j) for i in starts for j in starts if i <= j and self._are_mixed(i, j)][world.rank :: world.size]
        count_R, lowest_R = [0] * len(bounds), [1.0] * len(bounds)
        for i, j in own:
            is_genuine = self._place(i)[:, None] == self._place(j)
            score = self.scores(i, j)[is_genuine.triu(1) if i == j else is_genuine]
            for rate, bound in enumerate(bounds):
                above = score[score > bound]
                count_R[rate] += len(above)
                lowest_R[rate] = min([lowest_R[rate], *([float(above.min())] if len(above) else [])])
        found = torch.tensor([[count_R, lowest_R]], dtype=torch.float64)
        found_W2R = world.all_gather(found, name=f"evaluate/{name}/genuine")
        return list(zip(found_W2R[:, 0].sum(0).long().tolist(), found_W2R[:, 1].amin(0).tolist(), strict=True))

    def scores(self, i: int, j: int) -> Tensor:
        """Returns (B, b) float64."""
        (unit_BD, half_B), (unit_bD, half_b) = self._side(self.row_ND, i), self._side(self.gallery_ND, j)
        return (unit_BD @ unit_bD.T).add_(half_B[:, None] + half_b)

    def _side(self, row_ND: NDArray[np.float32], i: int) -> tuple[Tensor, Tensor]:
        """Returns the rounded embeddings of a block, and (1 - length^2) / 2 of each."""
        row_BD = torch.from_numpy(row_ND[self.order_N[i : i + _BLOCK]]).to(self.device, torch.float64)
        unit_BD = row_BD.mul_(_PER_UNIT).round_().div_(_PER_UNIT)
        return unit_BD, (1 - unit_BD.square().sum(1)) / 2

    def _place(self, i: int) -> Tensor:
        return torch.from_numpy(self.place_N[i : i + _BLOCK]).to(self.device)

    def _are_mixed(self, i: int, j: int) -> bool:
        """Tells whether blocks i <= j have a class in common."""
        return bool(self.place_N[min(i + _BLOCK, len(self.place_N)) - 1] >= self.place_N[j])
