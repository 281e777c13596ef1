"""Identification (1:N): the nearest gallery image of each probe.

P probes, B of a block, G gallery images, D feature width, K neighbours kept, C classes.

A probe has a mate if its class is in the gallery. Ties count against the model everywhere: a network with equal outputs
for all images identifies nobody.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc import terminal
from partial_fc.comm import World
from partial_fc.evaluate.evaluation import own_part
from partial_fc.evaluate.verification import wilson_interval
from partial_fc.head.kernels.nearest import Nearest

FALSE_POSITIVE_RATES = ("1e-1", "1e-2", "1e-3", "1e-4")
# Rows of one matrix product: 512 x 65,536 similarities are 128 MB for any size of gallery and probes.
_PROBES_AT_ONCE, _GALLERY_AT_ONCE = 512, 65536


@dataclass(frozen=True)
class Found:
    """The search results of each probe, equal on every rank."""

    # (P,) rank of the probe's own class among the nearest classes, from 1; 0: no mate, or beyond max_rank
    rank_P: NDArray[np.int64]
    precision_P: NDArray[np.float64]  # (P,) average precision at R, see `search`; NaN without a mate
    has_mate_P: NDArray[np.bool_]
    # (P, K), the nearest first; -1 if the gallery has fewer than K
    neighbour_PK: NDArray[np.int64]
    cosine_PK: NDArray[np.float64]

    def values(self, ranks: tuple[int, ...] = (1, 5)) -> Iterator[tuple[str, float]]:
        """Yields ("rank1", ...): fractions of the probes with a mate. tpir@fpir=X: see `tpir_at`. map@r: mean
        average precision at R (Musgrave et al., 2020)."""
        num_mates = int(self.has_mate_P.sum())
        for rank in ranks:
            right = int(((self.rank_P > 0) & (self.rank_P <= rank)).sum())
            yield f"rank{rank}", right / num_mates
        low, high = wilson_interval(float((self.rank_P == 1).sum()) / num_mates, num_mates)
        yield "rank1_low", low
        yield "rank1_high", high
        yield "precision@1", int((self.rank_P == 1).sum()) / num_mates
        yield "map@r", float(self.precision_P[self.has_mate_P].mean())
        for fpir in FALSE_POSITIVE_RATES:
            tpir, threshold = self.tpir_at(float(fpir))
            yield f"tpir@fpir={fpir}", tpir
            yield f"threshold@fpir={fpir}", threshold

    def tpir_at(self, fpir: float) -> tuple[float, float]:
        """Returns (true positive identification rate, cosine that must be exceeded) at which at most a fraction fpir of
        the probes without a mate is identified; NaN with fewer than 1 / fpir of them."""
        unknown = np.sort(self.cosine_PK[~self.has_mate_P, 0])[::-1]
        if not len(unknown) or 0 < fpir < 1 / len(unknown):
            return float("nan"), float("nan")
        accepted = int(np.searchsorted(np.arange(len(unknown) + 1) / len(unknown), fpir, side="right")) - 1
        threshold = float(unknown[accepted]) if accepted < len(unknown) else -np.inf
        right = (self.rank_P == 1) & (self.cosine_PK[:, 0] > threshold)
        return int(right.sum()) / int(self.has_mate_P.sum()), threshold


def search(
    probe_PD: NDArray[np.float32],
    probe_label_P: NDArray[np.int64] | None,
    gallery_GD: NDArray[np.float32],
    gallery_label_G: NDArray[np.int64],
    world: World,
    device: torch.device,
    *,
    name: str,
    is_gallery: bool = False,
    max_rank: int = 5,
    shown: int = 5,
    bar: str = "",
) -> Found:
    """Searches each probe in the gallery; rows have length 1. Each rank searches its part of the probes; one collective
    of some 100 bytes a probe.

    probe_label_P: None: only the nearest images are asked for, and no probe has a mate.
    is_gallery: the probes are the gallery's images in its order, and none is its own neighbour. max_rank: of
    Found.rank_P. shown: K. bar: the name of a progress bar. The average precision of a probe with R mates is the mean,
    over its R nearest images, of the precision up to there if the image is a mate, else 0. Memory: gallery and probes,
    on the device too, and 300 MB for a block. Raises ValueError if no labelled probe has a mate.
    """
    classes, label_G = np.unique(gallery_label_G, return_inverse=True)
    count_C = np.bincount(label_G)
    asked_P = np.zeros(len(probe_PD), np.int64) if probe_label_P is None else probe_label_P
    place_P = np.searchsorted(classes, asked_P).clip(max=len(classes) - 1)
    in_gallery_P = (classes[place_P] == asked_P) & (probe_label_P is not None)
    label_P = np.where(in_gallery_P, place_P, -1)
    mates_P = np.where(in_gallery_P, count_C[place_P], 0) - int(is_gallery)
    if probe_label_P is not None and not (mates_P > 0).any():
        what = "every class has one image only" if is_gallery else "no probe has a class of the gallery"
        raise ValueError(f"{name}: {what} ({len(probe_PD)} probes, {len(classes)} classes in the gallery)")
    # So many hold more than max_rank classes: a mate outside them, or one that ties with the last, is beyond max_rank.
    kept = min(len(label_G), shown if probe_label_P is None else max(max_rank * int(count_C.max()) + 1, shown))
    rows = [torch.empty(0, 2 + 2 * shown, dtype=torch.float64)]
    gallery = torch.from_numpy(gallery_GD).to(device)
    blocks = own_part(-(-len(probe_PD) // _PROBES_AT_ONCE), world)
    for block in terminal.bar(blocks, desc=bar, unit="block", shown=bool(bar) and world.rank == 0):
        some = slice(block * _PROBES_AT_ONCE, min((block + 1) * _PROBES_AT_ONCE, len(probe_PD)))
        itself = torch.arange(some.start, some.stop, device=device) if is_gallery else None
        cosine, index = nearest(torch.from_numpy(probe_PD[some]), gallery, kept, device, itself)
        own = (label_G[index] == label_P[some, None]) & np.isfinite(cosine)
        order = np.lexsort((own, -cosine), axis=1)
        cosine, index, own = (np.take_along_axis(x, order, axis=1) for x in (cosine, index, own))
        rank_B = _ranks(label_G[index], own, max_rank)
        precision_B = _average_precision(own, mates_P[some])
        places = np.full((len(index), 2, shown), -1.0)
        places[:, 0, : index.shape[1]] = np.where(np.isfinite(cosine), index, -1)[:, :shown]
        places[:, 1, : index.shape[1]] = cosine[:, :shown]
        row = np.concatenate((rank_B[:, None], precision_B[:, None], places.reshape(len(index), -1)), axis=1)
        rows.append(torch.from_numpy(row))
    found = world.all_gather(torch.cat(rows), name=f"evaluate/{name}/found").numpy()
    neighbour_PK = found[:, 2 : 2 + shown].astype(np.int64)
    return Found(found[:, 0].astype(np.int64), found[:, 1], mates_P > 0, neighbour_PK, found[:, 2 + shown :])


def nearest(
    probe_BD: Tensor, gallery_GD: Tensor, kept: int, device: torch.device, itself_B: Tensor | None = None
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns (cosines, gallery indices) of the `kept` nearest, (B, kept) each, the nearest first. itself_B: each
    probe's own gallery index, which counts as the farthest (-inf)."""
    probe_BD = probe_BD.to(device)
    found = Nearest(len(probe_BD), kept, probe_BD.dtype, device)
    for start in range(0, len(gallery_GD), _GALLERY_AT_ONCE):
        cosine = probe_BD @ gallery_GD[start : start + _GALLERY_AT_ONCE].T
        if itself_B is not None:
            here = (itself_B >= start) & (itself_B < start + cosine.shape[1])
            cosine[here.nonzero()[:, 0], itself_B[here] - start] = -torch.inf
        found.add(cosine, torch.arange(start, start + cosine.shape[1], device=device))
    return found.cosine_GK.double().cpu().numpy(), found.class_GK.cpu().numpy()


def _ranks(label_BK: NDArray[np.int64], own_BK: NDArray[np.bool_], max_rank: int) -> NDArray[np.int64]:
    """Returns 1 + the number of other classes before the probe's own; 0: more than max_rank, or no mate."""
    first_B = own_BK.argmax(axis=1)
    rank_B = np.where(own_BK.any(axis=1), 1, 0)
    for row in np.flatnonzero(first_B):
        rank = 1 + len(np.unique(label_BK[row, : first_B[row]]))
        rank_B[row] = rank if rank <= max_rank else 0
    return rank_B


def _average_precision(own_BK: NDArray[np.bool_], mates_B: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the average precision at R = mates_B; NaN for R = 0."""
    place_K = np.arange(1, own_BK.shape[1] + 1)
    precision_BK = own_BK.cumsum(axis=1) / place_K * own_BK * (place_K <= mates_B[:, None])
    return np.where(mates_B > 0, precision_BK.sum(axis=1) / mates_B.clip(min=1), np.nan)
