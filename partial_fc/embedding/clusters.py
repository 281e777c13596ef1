"""Spherical k-means: clusters of vectors by direction, with the head's search for the nearest centres.

    assign   each rank searches blocks of rows among all centres; labels and cosines are gathered
    reseed   each cluster without a row takes over one of the rows that are farthest from their centres
    update   each rank adds up the rows of its range of clusters, in fp64 and in their order; centres are gathered

Blocks, order and random numbers are the same for any number of ranks, and so are the bits of all results. No (N, C)
numbers are ever stored.

N rows, B of a block, S of the sample, D width, C clusters, L of a rank, K nearest ones, M clusters of a part.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partial_fc import terminal
from partial_fc.comm import World
from partial_fc.counter_rng import derive_key, permute, uniform
from partial_fc.head.kernels import Kernel, Logits
from partial_fc.head.kernels.choice import choose
from partial_fc.head.margin import Negatives
from partial_fc.head.shard import Shard

if TYPE_CHECKING:
    from tqdm import tqdm

BLOCK = 4096  # rows that are searched, or added up, at once
_SAMPLE, _SAMPLE_OF_CLUSTER = 1 << 16, 4  # the start centres are drawn from so many rows, or so many for each cluster
_ROUND = 8  # one in so many of the start centres drawn so far is drawn before the distances are measured again
_SHORTEST = 1e-6  # mean of unit vectors that has a direction


class Clusters(NamedTuple):
    """The clusters after an iteration. moved: rows that have come from another one; cosine: the mean of the rows'
    cosines with their nearest centres before the iteration; reseeded: clusters that had no row."""

    centre_CD: Tensor  # float32, length 1
    label_N: NDArray[np.int64]
    iteration: int = 0
    moved: int = -1
    cosine: float = 0.0
    reseeded: int = 0


@dataclass(frozen=True)
class KMeans:
    """The rows to cluster, (N, D) of any floating-point type and any finite length but 0; the same on every rank."""

    row_ND: NDArray
    world: World
    device: torch.device
    kernel: Kernel = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernel", choose("auto", self.device, torch.float32, "fp32"))

    def start(self, num_clusters: int, seed: int) -> Tensor:
        """Returns rows as start centres (C, D), by k-means++ (Arthur and Vassilvitskii, 2007) on a sample: each is
        drawn with a probability in proportion to 1 - its largest cosine with those before. From the ninth on an eighth
        as many as there are is drawn at once. A collective."""
        size = min(len(self.row_ND), max(_SAMPLE, _SAMPLE_OF_CLUSTER * num_clusters))
        index_S = permute(torch.arange(size), len(self.row_ND), derive_key(seed, *b"sample")).sort()[0].numpy()
        # What is drawn has weight 0, and rows that equal it follow after all others.
        weight_S, centres = np.full(size, 2.0), torch.empty(0, self.row_ND.shape[1], device=self.device)
        with self._bar("start centres", num_clusters) as bar:
            while len(centres) < num_clusters:
                num = min(num_clusters - len(centres), max(1, len(centres) // _ROUND))
                bits_S2 = uniform(torch.arange(size), 2, derive_key(seed, len(centres), *b"draw")).double().numpy()
                # The smallest of exponential variables, over their weights: a draw without replacement.
                with np.errstate(divide="ignore"):
                    key_S = -np.log(bits_S2[:, 0] + (bits_S2[:, 1] + 2.0**-25) * 2.0**-24) / weight_S
                drawn = np.argsort(key_S, kind="stable")[:num]
                new = self.unit_rows(index_S[drawn]).to(self.device)
                for some, _, cosine_BK in self.nearest(new, 1, index_S):
                    distance_B = np.maximum(1.0 - cosine_BK[:, 0], 1e-12)
                    weight_S[some] = np.minimum(weight_S[some], distance_B)
                weight_S[drawn] = 0.0
                centres = torch.cat([centres, new])
                bar.update(num)
        return centres

    def iterate(self, before: Clusters) -> Clusters:
        """Returns the clusters after another iteration, with the same centres if no row moves. A collective of 16 N +
        4 C D bytes."""
        num_clusters, iteration = len(before.centre_CD), before.iteration + 1
        label_N, cosine_N = np.empty(len(self.row_ND), np.int64), np.empty(len(self.row_ND), np.float32)
        for some, class_BK, cosine_BK in self.nearest(before.centre_CD, 1, desc=f"iteration {iteration}"):
            label_N[some], cosine_N[some] = class_BK[:, 0], cosine_BK[:, 0]
        reseeded = reseed(label_N, cosine_N, num_clusters)
        moved = int((label_N != before.label_N).sum())
        centre_CD = self.means(label_N, before.centre_CD) if moved else before.centre_CD
        return Clusters(centre_CD, label_N, iteration, moved, float(cosine_N.mean(dtype=np.float64)), reseeded)

    def nearest(
        self, centre_CD: Tensor, k: int, index: NDArray[np.int64] | None = None, desc: str | None = None
    ) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.float64]]]:
        """Yields, block by block and on every rank, (which rows, their k nearest centres, cosines of float32), the
        nearest first, and the first of equal ones. index: of the rows to search for; None: all. desc: of the bar. A
        collective of 16 K bytes a row: every rank consumes the whole iterator."""
        count, size = len(self.row_ND if index is None else index), self.world.size
        with self._bar(desc, count) as bar:
            for first in range(0, count, size * BLOCK):
                ends = [min(first + BLOCK * i, count) for i in range(size + 1)]
                rows_W = [stop - start for start, stop in pairwise(ends)]
                own = slice(*ends[self.world.rank :][:2])
                packed = torch.empty(0, k, 2, dtype=torch.float64, device=self.device)
                if rows_W[self.world.rank]:
                    unit_BD = self.unit_rows(own if index is None else index[own]).to(self.device)
                    no_target_B = torch.full((len(unit_BD),), -1, device=self.device)
                    found = self.kernel.nearest(Logits(unit_BD, centre_CD, None, no_target_B, 1.0, Negatives()), k)
                    packed = torch.stack([found.class_GK.double(), found.cosine_GK.double()], dim=2)
                found_BK2 = self.world.start_all_gather(packed, rows_W, name="cluster/nearest").wait().cpu().numpy()
                yield slice(ends[0], ends[-1]), found_BK2[:, :, 0].astype(np.int64), found_BK2[:, :, 1]
                bar.update(ends[-1] - ends[0])

    def means(self, label_N: NDArray[np.int64], before_CD: Tensor) -> Tensor:
        """Returns the mean directions of all clusters; that of `before_CD` for a mean without one. A collective."""
        num_clusters, rank = len(before_CD), self.world.rank
        shards = [Shard.of(num_clusters, rank, self.world.size) for rank in range(self.world.size)]
        own = slice(shards[rank].start, shards[rank].stop)
        sum_LD = torch.zeros(len(shards[rank]), self.row_ND.shape[1], dtype=torch.float64)
        for first in range(0, len(label_N), BLOCK):
            some = slice(first, first + BLOCK)
            label_B = torch.from_numpy(label_N[some]) - own.start
            mine_B = (label_B >= 0) & (label_B < len(sum_LD))
            # (On the host, where the order is defined.)
            sum_LD.index_add_(0, label_B[mine_B], self.unit_rows(some)[mine_B].double())
        length_L1 = sum_LD.norm(dim=1, keepdim=True)
        count_L1 = torch.from_numpy(np.bincount(label_N, minlength=num_clusters)[own, None])
        before_LD = before_CD[own].cpu()
        mean_LD = torch.where(length_L1 > _SHORTEST * count_L1, (sum_LD / length_L1).float(), before_LD)
        rows_W = [len(shard) for shard in shards]
        return self.world.start_all_gather(mean_LD, rows_W, name="cluster/centres").wait().to(self.device)

    def unit_rows(self, which: slice | NDArray[np.int64]) -> Tensor:
        """Returns rows at length 1, float32 on the host."""
        row_BD = torch.from_numpy(self.row_ND[which].astype(np.float32, copy=isinstance(which, slice)))
        length_B1 = row_BD.norm(dim=1, keepdim=True)
        is_safe_B1 = (length_B1 > 1e-15) & (length_B1 < 1e15)  # else squares may be beyond float32
        if not is_safe_B1.all():
            exact_B1 = torch.linalg.vector_norm(row_BD, dim=1, keepdim=True, dtype=torch.float64).float()
            length_B1 = torch.where(is_safe_B1, length_B1, exact_B1)
        return row_BD.div_(length_B1)

    def _bar(self, desc: str | None, total: int) -> "tqdm[Any]":
        return terminal.bar(desc=desc or "", total=total, shown=self.world.rank == 0 and desc is not None, leave=False)


def reseed(label_N: NDArray[np.int64], cosine_N: NDArray[np.float32], num_clusters: int) -> int:
    """Gives each empty cluster, in their order, the row with the smallest cosine of those that are not alone in theirs,
    by changing its label; returns how many. N is at least num_clusters."""
    count_C = np.bincount(label_N, minlength=num_clusters)
    empty = np.flatnonzero(count_C == 0)
    # A row that is passed stays alone: clusters only shrink, but for these.
    farthest = iter(cosine_N.argsort(kind="stable").tolist()) if len(empty) else iter(())
    for cluster in empty.tolist():
        row = next(row for row in farthest if count_C[label_N[row]] > 1)
        count_C[label_N[row]] -= 1
        label_N[row] = cluster
    return len(empty)
