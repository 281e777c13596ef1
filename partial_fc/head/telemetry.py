"""How the head is doing, seen through a few of its rows: how many were never touched, how old, long and near they are.

    report = observe(head)          # every few hundred steps, on all ranks; three small collectives
    report.scalars, report.histograms, report.similar

Nothing here looks at all rows: up to NUM_ROWS of a rank, drawn by (seed, step, rank), stand for the others, and
NUM_QUERIES classes are compared with up to NUM_COMPARED rows of each rank, other ones each time. So shares are
estimates.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from partial_fc import keyed
from partial_fc.head.partial_fc import PartialFC

NUM_ROWS = 8192
NUM_QUERIES = 128
NUM_COMPARED = 65_536
_CHUNK = 4096  # rows compared at a time
SIMILAR = 0.6  # cosine of two centres from which on they may well be one identity under two numbers

COSINE_EDGES = torch.linspace(-1, 1, 81, dtype=torch.float64)
LENGTH_EDGES = torch.cat((torch.zeros(1, dtype=torch.float64), 2.0 ** torch.linspace(-10, 10, 81).double()))
AGE_EDGES = torch.cat((torch.zeros(1, dtype=torch.float64), 2.0 ** torch.arange(32, dtype=torch.float64)))


@dataclass(frozen=True)
class Histogram:
    """Counts between edges; what lies beyond the outer edges counts in the outer bins."""

    edges: Tensor  # float64 (bins + 1,), ascending
    counts: Tensor  # float64 (bins,)
    total: float
    square_total: float

    @classmethod
    def unpack(cls, packed: Tensor, edges: Tensor) -> "Histogram":
        """Of what `pack` made, summed over ranks."""
        return cls(edges, packed[:-2].cpu(), packed[-2].item(), packed[-1].item())

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def smallest(self) -> float:
        """The lower edge of the first bin that holds something."""
        return self.edges[self.counts.nonzero()[0, 0]].item()

    @property
    def largest(self) -> float:
        """The upper edge of the last bin that holds something."""
        return self.edges[self.counts.nonzero()[-1, 0] + 1].item()

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan


def pack(values: Tensor, edges: Tensor) -> Tensor:
    """Counts of each bin, the sum, the sum of squares: float64 (bins + 2,), so that those of all ranks may be added."""
    values = values.double().flatten()
    bins = torch.bucketize(values, edges[1:-1].to(values.device), right=True)
    counts = torch.bincount(bins, minlength=len(edges) - 1).double()
    return torch.cat((counts, values.sum()[None], values.square().sum()[None]))


def draw(num: int, most: int, key: int) -> Tensor:
    """min(num, most) different numbers of [0, num), ascending, int64; a function of the key alone."""
    if num <= most:
        return torch.arange(num)
    return keyed.permute(torch.arange(most), num, key).sort().values


def ages(touched_N: Tensor, num_steps: int) -> Tensor:
    """Steps since the last touch, of the rows that have been touched: float64 (at most N,).

    touched_N: the number of steps that were done when the row was last touched, that one included; 0: never.
    """
    return (num_steps - touched_N[touched_N > 0]).double()


def covered_mass(denominator_G: Tensor, own_logit_G: Tensor, rate: float, corrected: bool) -> Tensor:
    """The estimated share of the full softmax's denominator that the sampled classes and the own one hold: (G,).

    denominator_G: over the classes that took part. Their negatives are a share `rate` of all negatives, so all of
    them hold 1 / rate times as much (the other classes of the batch, which always take part, are taken for drawn
    ones, too). corrected: the negatives' terms in it have already been divided by the rate.
    """
    own_G = own_logit_G.double().exp()
    negatives_G = (denominator_G.double() - own_G).clamp_(min=0.0)  # below 0 by rounding alone
    if corrected:
        negatives_G = negatives_G * rate
    return (negatives_G + own_G) / (negatives_G / rate + own_G)


def nearest(
    query_QD: Tensor, query_class_Q: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """(cosine, class) of the nearest row of another class, for each query: float64 (Q,) and int64 (Q,).

    chunks: (rows (K, D), their classes (K,)). -inf and -1 where there is none. A row of length 0 has cosine 0 with all.
    """
    unit_QD = normalize(query_QD.float())
    best_Q = torch.full_like(unit_QD[:, 0], -torch.inf)
    best_class_Q = torch.full_like(query_class_Q, -1)
    for row_KD, class_K in chunks:
        cos_QK = unit_QD @ normalize(row_KD.float()).T
        cos_QK.masked_fill_(query_class_Q[:, None] == class_K[None], -torch.inf)
        most = cos_QK.max(dim=1)
        better_Q = most.values > best_Q
        best_Q = torch.where(better_Q, most.values, best_Q)
        best_class_Q = torch.where(better_Q, class_K[most.indices], best_class_Q)
    return best_Q.double(), best_class_Q


@dataclass(frozen=True)
class Report:
    """Equal on all ranks."""

    scalars: dict[str, float]
    histograms: dict[str, Histogram]
    similar: list[tuple[int, int, float]]  # (class, other class, cosine of their centres), the nearest first


def observe(head: PartialFC, similar: float = SIMILAR) -> Report:
    """What there is to say after a step, from the head's rows and its last forward pass. A collective: all-reduce of
    the queries' centres, NUM_QUERIES * D float32 (head/telemetry_queries); all-gather of (cosine, class) for each
    query, float64 (head/telemetry_nearest); all-reduce of the counts, about 250 float64 (head/telemetry).
    """
    world, rows = head.world, head.row_state()
    key = keyed.fold(head.sampling.seed, head.num_steps, world.rank, *b"telemetry")
    device = rows["centres"].device
    at_N = draw(len(head.shard), NUM_ROWS, key).to(device)
    touched_N = rows["touched"].flatten(1)[at_N, 0]
    lives_N = touched_N > 0
    length_N = _first_centres(rows["centres"], at_N[lives_N]).float().norm(dim=1)
    packed = [
        torch.tensor([len(at_N), len(at_N) - int(lives_N.sum())], dtype=torch.float64, device=device),
        pack(ages(touched_N, head.num_steps), AGE_EDGES),
        pack(length_N, LENGTH_EDGES),
        pack(head.last_step["own_cos"], COSINE_EDGES),
    ]
    counts, *histograms = world.all_reduce(torch.cat(packed), name="head/telemetry").split(
        [2, *(len(edges) + 1 for edges in (AGE_EDGES, LENGTH_EDGES, COSINE_EDGES))]
    )
    class_Q, near_class_Q, near_cos_Q = _nearest_of_all(head, rows, key)
    found = near_cos_Q > similar
    scalars = {
        "head/never_touched": (counts[1] / counts[0]).item(),
        "head/similar_classes": found.double().mean().item(),
    }
    if head.sampling.rate < 1.0:
        step = head.last_step
        covered_G = covered_mass(
            step["denominator"], step["own_logit"], head.sampling.rate, head.sampling_correction
        )
        scalars["head/covered_mass"] = covered_G.mean().item()
    edges = (AGE_EDGES, LENGTH_EDGES, COSINE_EDGES, COSINE_EDGES)
    histograms.append(pack(near_cos_Q, COSINE_EDGES))
    names = ("head/age", "head/centre_length", "head/own_cosine", "head/nearest_cosine")
    pairs = zip(
        class_Q[found].tolist(), near_class_Q[found].tolist(), near_cos_Q[found].tolist(), strict=True
    )
    return Report(
        scalars,
        {n: Histogram.unpack(h, e) for n, h, e in zip(names, histograms, edges, strict=True)},
        sorted(pairs, key=lambda pair: -pair[2]),
    )


def _nearest_of_all(head: PartialFC, rows: dict[str, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor]:
    """(classes, the nearest other class of each, their cosine), of touched rows only; (at most NUM_QUERIES,) each."""
    world, shard, centres = head.world, head.shard, rows["centres"]
    touched_L = rows["touched"].flatten(1)[:, 0]
    # The same queries on all ranks.
    class_Q = draw(
        shard.num_classes, NUM_QUERIES, keyed.fold(head.sampling.seed, head.num_steps, *b"queries")
    )
    class_Q = class_Q.to(centres.device)
    mine = ((class_Q >= shard.start) & (class_Q < shard.stop)).nonzero().squeeze(1)
    mine = mine[touched_L[class_Q[mine] - shard.start] > 0]
    query_QD = torch.zeros(len(class_Q), head.embedding_size, device=centres.device)
    query_QD[mine] = _first_centres(centres, class_Q[mine] - shard.start).float()
    query_QD = world.all_reduce(query_QD, name="head/telemetry_queries")

    at_N = draw(len(shard), NUM_COMPARED, key).to(centres.device)
    at_N = at_N[touched_L[at_N] > 0]
    parts = at_N.split(_CHUNK) if len(at_N) else ()
    chunks = ((_first_centres(centres, at_K), at_K + shard.start) for at_K in parts)
    cos_Q, near_Q = nearest(query_QD, class_Q, chunks)
    mine_1Q2 = torch.stack((cos_Q, near_Q.double()), dim=1)[None]
    best_WQ2 = world.all_gather(mine_1Q2, name="head/telemetry_nearest")
    cos_Q, rank_Q = best_WQ2[:, :, 0].max(dim=0)
    near_Q = best_WQ2[:, :, 1].gather(0, rank_Q[None]).squeeze(0).long()
    known = (query_QD.norm(dim=1) > 0) & (near_Q >= 0)
    return class_Q[known], near_Q[known], cos_Q[known]


def _first_centres(centres: Tensor, at_N: Tensor) -> Tensor:
    """Rows of (L, D), or of (L, sub_centres, D) the first sub-centre of each: (N, D)."""
    rows = centres.index_select(0, at_N)
    return rows if rows.dim() == 2 else rows[:, 0]
