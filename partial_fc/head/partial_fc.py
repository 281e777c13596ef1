"""Partial FC: a margin softmax over class centres that are sharded over the ranks.

One step, as the data sees it, with its three collectives (per rank: B*(D*itemsize + 12), 16*G and 4*G*D bytes):
  1. head/gather     all-gather of (feature, label, rank) rows: every rank holds feat_GD and label_G;
  2. head/softmax    all-reduce of (denominator, own logit), two float64 a row;
  3. head/features   reduce-scatter of the features' gradient: each rank gets its own rows of the sum.
The maths between them is in softmax.py. (An, Zhu et al., "Partial FC: Training 10 Million Identities on a Single
Machine", https://arxiv.org/abs/2010.05222.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from partial_fc import keyed
from partial_fc.comm import SingleWorld, World
from partial_fc.head import softmax
from partial_fc.head.margin import Margin, value_and_slope
from partial_fc.head.sampling import Sampling
from partial_fc.head.shard import Shard
from partial_fc.optim.rows import RowOptimizer, RowSGD

# The denominators of the ranks are added as exp(log-sum-exp) in float64, whose range ends at exp(709): with logits
# bounded by this, no maximum has to be agreed upon first, and no row can under- or overflow.
_LARGEST_LOGIT = 600.0


class PartialFC:
    """A last layer of num_classes centres, of which this rank keeps and updates its own shard.

        loss = head(feat_BD, label_B)   # scalar of `dtype`, equal on every rank: the mean over the global batch
        loss.backward()                 # feat_BD.grad = d(loss)/d(these rows), exact: nothing is to be divided again
        head.step(lr)                   # updates the centres that took part

    sample_rate: the share of all classes that are negatives in a step; the classes of the batch always take part.
    The batch sizes of the ranks may differ, and be 0. Centres start as N(0, 0.01) by (seed, class), alike for any
    number of ranks. dtype: of the centres, their state, and everything computed from them; float64 is for checks.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        margin: Margin,
        sample_rate: float = 1.0,
        world: World | None = None,
        seed: int = 0,
        optimizer: RowOptimizer | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        if margin.scale * margin.bound > _LARGEST_LOGIT:
            raise ValueError(
                f"scale {margin.scale} allows logits up to {margin.scale * margin.bound:.0f}; "
                f"expected at most {_LARGEST_LOGIT:.0f}: choose a smaller scale"
            )
        self.world = world or SingleWorld()
        self.margin = margin
        self.embedding_size = embedding_size
        self.shard = Shard.of(num_classes, self.world.rank, self.world.size)
        self.sampling = Sampling(num_classes, sample_rate, seed)
        self.optimizer = optimizer or RowSGD()
        self.num_steps = 0  # counts `step`; with the seed it decides the negatives
        self._centre_LD = initial_centres(self.shard, embedding_size, seed).to(device, dtype)
        self._row_state = self.optimizer.state(self._centre_LD)
        self._gradient: list[
            tuple[Tensor | None, Tensor]
        ] = []  # (rows, gradient) of each backward since `step`

    @property
    def centres(self) -> Tensor:
        """This rank's centres, (stop - start, D). Not a copy: do not write to it."""
        return self._centre_LD.detach()

    def __call__(self, feat_BD: Tensor, label_B: Tensor) -> Tensor:
        """feat_BD: floating; label_B: int64 class numbers. Raises ValueError, on all ranks alike, for a label outside
        of [0, num_classes)."""
        if (
            feat_BD.dim() != 2
            or feat_BD.shape[1] != self.embedding_size
            or label_B.shape != feat_BD.shape[:1]
        ):
            raise ValueError(
                f"{self.world}: features {tuple(feat_BD.shape)} with labels {tuple(label_B.shape)}; "
                f"expected (B, {self.embedding_size}) and (B,)"
            )
        return _Loss.apply(feat_BD, label_B, self)

    def gradient_square_sum(self) -> Tensor:
        """Sum of squares of the centres' gradient over all ranks (a collective), for clipping: float64 scalar."""
        self._merge_gradients()
        here = sum((grad.double().square().sum() for _, grad in self._gradient), self._zero())
        return self.world.all_reduce(here, name="head/gradient_norm")

    def scale_gradient(self, factor: float) -> None:
        """Multiplies the gradient that `step` will use."""
        for _, grad in self._gradient:
            grad.mul_(factor)

    def step(self, lr: float) -> None:
        """Updates the centres that took part since the last step, and moves on to the next step's negatives."""
        self._merge_gradients()
        for row_S, grad_SD in self._gradient:
            self.optimizer.step(self._centre_LD, self._row_state, row_S, grad_SD, lr)
        self._gradient = []
        self.num_steps += 1

    def row_state(self) -> dict[str, Tensor]:
        """Everything that a class has here, by name, one row for each local class: what a checkpoint keeps."""
        return {"centres": self._centre_LD, **self._row_state}

    def load_row_state(self, rows: dict[str, Tensor], num_steps: int) -> None:
        """Takes over what `row_state` gave, for this rank's class range."""
        mine = self.row_state()
        if rows.keys() != mine.keys():
            raise ValueError(
                f"{self.world}: row state {sorted(rows)}; expected {sorted(mine)} for this optimiser"
            )
        for name, tensor in mine.items():
            if rows[name].shape != tensor.shape:
                raise ValueError(
                    f"{self.world}: {name} has shape {tuple(rows[name].shape)}; expected {tuple(tensor.shape)}"
                )
            tensor.copy_(rows[name])
        self.num_steps = num_steps

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._centre_LD.device)

    def _merge_gradients(self) -> None:
        """Several backwards before a step (accumulation) touch overlapping rows: adds them up by row."""
        if len(self._gradient) < 2:
            return
        parts = self._gradient
        if any(row_S is None for row_S, _ in parts):
            self._gradient = [(None, torch.stack([grad for _, grad in parts]).sum(dim=0))]
            return
        rows, place = torch.unique(
            torch.cat([row for row, _ in parts if row is not None]), return_inverse=True
        )
        total = self._centre_LD.new_zeros(len(rows), self.embedding_size)
        self._gradient = [(rows, total.index_add_(0, place, torch.cat([grad for _, grad in parts])))]

    def _sampled_rows(self, label_G: Tensor) -> Tensor | None:
        """Local rows that take part in this step, ascending: negatives and every class of the batch. None: all."""
        if self.sampling.rate == 1.0:
            return None
        mine = label_G[(label_G >= self.shard.start) & (label_G < self.shard.stop)]
        negatives = self.sampling.negatives(self.num_steps, self.shard, label_G.device)
        return torch.unique(torch.cat((negatives, mine))) - self.shard.start


def initial_centres(shard: Shard, embedding_size: int, seed: int) -> Tensor:
    """N(0, 0.01) rows for the classes of a shard: float32 (L, D), a function of (seed, class number) alone."""
    key = keyed.fold(seed, *b"centres")
    centre_LD = torch.empty(len(shard), embedding_size)
    for begin in range(
        0, len(shard), 4096
    ):  # the integers behind the numbers take several times their memory
        end = min(begin + 4096, len(shard))
        centre_LD[begin:end] = keyed.normal(
            torch.arange(shard.start + begin, shard.start + end), embedding_size, key
        )
    return centre_LD.mul_(0.01)


@dataclass
class _Batch:
    """The global batch, in rank order."""

    feat_GD: Tensor
    label_G: Tensor
    rows: list[int]  # how many of them each rank brought


def _gather(feat_BD: Tensor, label_B: Tensor, world: World) -> _Batch:
    """All features and labels in one all-gather. Their bits travel side by side, with the rank they come from, so
    that batches of different sizes need no second exchange."""
    rank_B = torch.full_like(label_B, world.rank, dtype=torch.int32)
    parts = [x.contiguous().view(torch.uint8) for x in (feat_BD, label_B[:, None], rank_B[:, None])]
    wire = world.all_gather(torch.cat(parts, dim=1), name="head/gather")
    widths = [part.shape[1] for part in parts]
    # (contiguous() would leave a single row with the stride of the whole wire, which no other dtype divides)
    feat, label, rank = (x.clone(memory_format=torch.contiguous_format) for x in wire.split(widths, dim=1))
    rank_G = rank.view(torch.int32).squeeze(1)
    return _Batch(
        feat.view(feat_BD.dtype),
        label.view(torch.int64).squeeze(1),
        torch.bincount(rank_G, minlength=world.size).tolist(),
    )


def _check_labels(batch: _Batch, num_classes: int) -> None:
    """Every rank sees all labels, so all raise the same error and none is left waiting in a collective."""
    bad = ((batch.label_G < 0) | (batch.label_G >= num_classes)).nonzero().flatten()
    if not len(bad):
        return
    index, rank = int(bad[0]), 0
    while index >= batch.rows[rank]:
        index -= batch.rows[rank]
        rank += 1
    raise ValueError(
        f"label {int(batch.label_G[bad[0]])} at index {index} of rank {rank}'s batch is outside of [0, {num_classes}) "
        f"({len(bad)} such label(s) in the global batch); check the data's labels, or raise num_classes"
    )


class _Loss(torch.autograd.Function):
    """forward: all-gather, local log-sum-exp, one reduction; backward: local gradients, one reduce-scatter."""

    @staticmethod
    def forward(ctx, feat_BD: Tensor, label_B: Tensor, head: PartialFC) -> Tensor:
        world, centre_LD, scale = head.world, head._centre_LD, head.margin.scale
        batch = _gather(feat_BD.detach(), label_B, world)
        _check_labels(batch, head.shard.num_classes)
        if not len(batch.label_G):
            raise ValueError("the global batch is empty: no rank brought a row")
        unit_GD, norm_G1 = softmax.unit(batch.feat_GD.to(centre_LD.dtype))

        row_S = head._sampled_rows(batch.label_G)
        local_G = batch.label_G - head.shard.start
        own = ((local_G >= 0) & (local_G < len(head.shard))).nonzero().squeeze(1)
        target_G, slope_G = (torch.zeros_like(norm_G1[:, 0]) for _ in range(2))
        column_G = torch.full_like(local_G, -1)
        cos = softmax.own_cosine(unit_GD, centre_LD, own, local_G[own])
        target_G[own], slope_G[own] = value_and_slope(head.margin, cos)
        column_G[own] = local_G[own] if row_S is None else torch.searchsorted(row_S, local_G[own])

        local_total_G = softmax.log_sum_exp(unit_GD, centre_LD, row_S, column_G, target_G, scale)
        both_G2 = torch.stack((local_total_G.double().exp(), target_G.double()), dim=1)
        denominator_G, own_logit_G = world.all_reduce(both_G2, name="head/softmax").unbind(dim=1)
        total_G = denominator_G.log()

        ctx.head, ctx.rows, ctx.dtype, ctx.row_S = head, batch.rows, feat_BD.dtype, row_S
        ctx.save_for_backward(unit_GD, norm_G1, column_G, target_G, slope_G, total_G.to(centre_LD.dtype))
        return (total_G - own_logit_G).mean().to(centre_LD.dtype)

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        head: PartialFC = ctx.head
        unit_GD, norm_G1, column_G, target_G, slope_G, total_G = ctx.saved_tensors
        grad_unit_GD, grad_centre_SD = softmax.gradients(
            unit_GD,
            head._centre_LD,
            ctx.row_S,
            column_G,
            target_G,
            slope_G,
            total_G,
            head.margin.scale,
            grad_loss / len(unit_GD),
        )
        head._gradient.append((ctx.row_S, grad_centre_SD))
        grad_feat_GD = softmax.unit_backward(grad_unit_GD, unit_GD, norm_G1)
        grad_feat_BD = head.world.reduce_scatter(grad_feat_GD, ctx.rows, name="head/features")
        return grad_feat_BD.to(ctx.dtype), None, None
