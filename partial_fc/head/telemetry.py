"""Telemetry: statistics of a sample of the head's rows: how many are untouched, their age, lengths and similarities.

    report = observe(head)          # every few hundred steps, on all ranks; three small collectives
    report.scalars, report.histograms, report.similar

Shares are estimates: up to NUM_ROWS rows of a rank, drawn by (seed, step, rank), stand for the others, and NUM_QUERIES
classes are compared with up to NUM_COMPARED rows of each rank, other ones each time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from partial_fc import counter_rng
from partial_fc.head.kernels import Nearest
from partial_fc.head.partial_fc import PartialFC
from partial_fc.head.protocol import Head

NUM_ROWS = 8192
NUM_QUERIES = 128
NUM_COMPARED = 65_536
_BLOCK = 4096  # of rows compared, at a time
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
        """Reads what `pack` made, summed over ranks."""
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


def pack(values: Tensor, edges: Tensor) -> Tensor:
    """Counts of each bin, the sum, the sum of squares: float64 (bins + 2,), so that those of all ranks may be added."""
    values = values.double().flatten()
    bins = torch.bucketize(values, edges[1:-1].to(values.device), right=True)
    counts = torch.bincount(bins, minlength=len(edges) - 1).double()
    return torch.cat((counts, values.sum()[None], values.square().sum()[None]))


def draw(num: int, most: int, key: int) -> Tensor:
    """Returns min(num, most) different numbers of [0, num), ascending, int64; a function of the key alone."""
    if num <= most:
        return torch.arange(num)
    return counter_rng.permute(torch.arange(most), num, key).sort().values


def covered_mass(denominator_G: Tensor, target_logit_G: Tensor, rate: float) -> Tensor:
    """Returns the estimated share of the full softmax's denominator that the sampled classes and the target hold: (G,).

    denominator_G: over the classes that took part. Their negatives are a share `rate` of all negatives, so all of
    them hold 1 / rate times as much (the other classes of the batch, which always take part, are taken for drawn
    ones, too).
    """
    target_G = target_logit_G.double().exp()
    negatives_G = (denominator_G.double() - target_G).clamp_(min=0.0)  # below 0 by rounding alone
    return (negatives_G + target_G) / (negatives_G / rate + target_G)


def nearest(query_QD: Tensor, query_class_Q: Tensor, chunks: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns (cosine, class) of the nearest row of another class for each query: float64 (Q,) and int64 (Q,).

    chunks: (rows (K, D), their classes (K,)). -inf and -1 where there is none. A row of length 0 has cosine 0 with all.
    """
    unit_QD = normalize(query_QD.float())
    found = Nearest(len(unit_QD), 1, unit_QD.dtype, unit_QD.device)
    for row_KD, class_K in chunks:
        if len(row_KD):
            cos_QK = unit_QD @ normalize(row_KD.float()).T
            found.add(cos_QK.masked_fill_(query_class_Q[:, None] == class_K[None], -torch.inf), class_K)
    cos_Q = found.cosine_GK[:, 0]
    return cos_Q.double(), found.class_GK[:, 0].where(cos_Q > -torch.inf, -1)


@dataclass(frozen=True)
class Report:
    """The figures of one step, equal on all ranks."""

    scalars: dict[str, float]
    histograms: dict[str, Histogram]
    similar: list[tuple[int, int, float]]  # (class, other class, cosine of their centres), the nearest first


def observe_tables(head: Head) -> dict[str, Report]:
    """Returns the report of each table that is a PartialFC."""
    return {name: observe(table) for name, table in head.tables().items() if isinstance(table, PartialFC)}


def observe(head: PartialFC, similar: float = SIMILAR) -> Report:
    """Reports on the head after a step, from its rows and its last forward pass. A collective: all-reduce of
    the queries' centres, NUM_QUERIES * D float32 (head/telemetry_queries); all-gather of (cosine, class) for each
    query, float64 (head/telemetry_nearest); all-reduce of the counts, about 250 float64 (head/telemetry).
    """
    rows, last = head.row_state(), head.last_step
    device = last["target_cos"].device
    key = counter_rng.derive_key(head.draw.seed, head.num_steps, head.world.rank, *b"telemetry")
    at_N = draw(len(head.shard), NUM_ROWS, key)
    touched_N = _of(rows["touched"], at_N).squeeze(1)
    length_N = _of(rows["centres"], at_N.to(touched_N.device)[touched_N > 0]).float().norm(dim=1)
    values = {
        f"{head.scope}/age": (head.num_steps - touched_N[touched_N > 0], AGE_EDGES),  # steps since the last touch
        f"{head.scope}/centre_length": (length_N, LENGTH_EDGES),
        f"{head.scope}/target_cosine": (last["target_cos"][~last["elsewhere"]], COSINE_EDGES),
    }
    counts = torch.tensor([len(at_N), (touched_N == 0).sum()], dtype=torch.float64)
    parts = [counts, *(pack(*value) for value in values.values())]
    total = head.world.all_reduce(torch.cat([part.to(device) for part in parts]), name=f"{head.scope}/telemetry")
    counts, *parts = total.split([len(part) for part in parts])
    named = zip(values.items(), parts, strict=True)
    histograms = {name: Histogram.unpack(packed, edges) for (name, (_, edges)), packed in named}
    class_Q, near_class_Q, near_cos_Q = _nearest_of_all(head, rows, key, device)
    histograms[f"{head.scope}/nearest_cosine"] = Histogram.unpack(pack(near_cos_Q, COSINE_EDGES), COSINE_EDGES)
    is_similar = near_cos_Q > similar
    scalars = {f"{head.scope}/never_touched": (counts[1] / counts[0]).item()}
    if len(is_similar):
        scalars[f"{head.scope}/similar_classes"] = is_similar.double().mean().item()
    rate = head.draw.rates.at(max(0, head.num_steps - 1))  # of the step that has been made
    if rate < 1.0:
        covered_G = covered_mass(last["denominator"], last["target_logit"], rate)
        scalars[f"{head.scope}/covered_mass"] = covered_G.mean().item()
    pairs = zip(*(x[is_similar].tolist() for x in (class_Q, near_class_Q, near_cos_Q)), strict=True)
    return Report(scalars, histograms, sorted(pairs, key=lambda pair: -pair[2]))


def _nearest_of_all(
    head: PartialFC, rows: dict[str, Tensor], key: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """(classes, the nearest other class of each, their cosine), of touched rows only; (at most NUM_QUERIES,) each."""
    world, shard = head.world, head.shard
    # The same queries on all ranks.
    query_key = counter_rng.derive_key(head.draw.seed, head.num_steps, *b"queries")
    class_Q = draw(shard.num_classes, NUM_QUERIES, query_key)
    mine = ((class_Q >= shard.start) & (class_Q < shard.stop)).nonzero().squeeze(1)
    query_QD = torch.zeros(len(class_Q), head.embedding_size)
    local = class_Q[mine] - shard.start
    touched = (_of(rows["touched"], local) > 0).cpu()
    query_QD[mine] = torch.where(touched, _of(rows["centres"], local).float().cpu(), 0.0)
    query_QD = world.all_reduce(query_QD.to(device), name=f"{head.scope}/telemetry_queries")

    def compared() -> Iterator[tuple[Tensor, Tensor]]:
        # Whole blocks of rows, which lie together.
        for block in draw(-(-len(shard) // _BLOCK), NUM_COMPARED // _BLOCK, key).tolist():
            part = slice(block * _BLOCK, min((block + 1) * _BLOCK, len(shard)))
            lives = rows["touched"][part].flatten(1)[:, 0] > 0
            class_K = torch.arange(shard.start + part.start, shard.start + part.stop, device=lives.device)
            centre_KD = rows["centres"][part].flatten(1)[:, : head.embedding_size]
            yield centre_KD[lives].to(device), class_K[lives].to(device)

    class_Q = class_Q.to(device)
    cos_Q, near_Q = nearest(query_QD, class_Q, compared())
    mine_1Q2 = torch.stack((cos_Q, near_Q.double()), dim=1)[None]
    best_WQ2 = world.all_gather(mine_1Q2, name=f"{head.scope}/telemetry_nearest")
    cos_Q, rank_Q = best_WQ2[:, :, 0].max(dim=0)
    near_Q = best_WQ2[:, :, 1].gather(0, rank_Q[None]).squeeze(0).long()
    valid = (query_QD.norm(dim=1) > 0) & (near_Q >= 0)
    return class_Q[valid], near_Q[valid], cos_Q[valid]


def _of(table: Tensor, at_N: Tensor) -> Tensor:
    """Rows of (L, D), or of (L, sub_centres, D) the first sub-centre of each: (N, D)."""
    rows = table.index_select(0, at_N.to(table.device))
    return rows if rows.dim() == 2 else rows[:, 0]
