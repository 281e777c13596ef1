"""The loss of the sharded head as one autograd function: how kernels, margins and collectives come together."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from partial_fc.head.deferred import Pending
from partial_fc.head.gather import gather
from partial_fc.head.kernels import Logits, Slopes, Sums
from partial_fc.head.kernels.plain import unit, unit_backward
from partial_fc.head.margin import value_and_slope

if TYPE_CHECKING:
    from partial_fc.head.partial_fc import PartialFC


class Loss(torch.autograd.Function):
    """forward: gather, one pass over the centres, one reduction, and the features' gradient on its way home;
    backward: takes it in, and leaves the slopes for `step`."""

    @staticmethod
    def forward(ctx, feat_BD: Tensor, label_B: Tensor, head: "PartialFC") -> Tensor:
        training = ctx.needs_input_grad[0]
        batch = gather(feat_BD.detach(), label_B, head.shard.num_classes, head.world)
        unit_GD, norm_G1 = unit(batch.feat_GD.to(head.dtype))
        part = head.taking_part(batch.label_G)
        own = _Own(head, batch.label_G, unit_GD, part.rows, part.table, part.row_S)
        own_cos_G = None
        if head.margin.needs_own_cosines:
            own_cos_G = head.world.all_reduce(own.spread(own.cos_N.double()), name="head/own")
        if training:
            head.advance_margin(norm_G1[:, 0], own_cos_G)
        own.apply_margin(head, norm_G1[:, 0])

        negatives = head.margin.negatives(own_cos_G, head.margin_state)
        if head.filter_above is not None:
            negatives = dataclasses.replace(negatives, filter_above=head.filter_above)
        logits = Logits(
            unit_GD,
            part.table,
            part.row_S,
            own.place_G,
            head.margin.scale,
            negatives,
            part.bias_S,
            head.sub_centres,
        )
        sums = head.kernel.sums(logits, want_pull=training, want_total=head.label_smoothing > 0)
        whole = _reduce(head, own, sums, unit_GD, logits.num_sampled)
        head.last_step = {
            "own_cos": own.cos_N,
            "denominator": whole.denominator_G,
            "own_logit": whole.own_logit_G,
        }

        if training:
            ctx.head, ctx.logits, ctx.rows = head, logits, part.rows
            ctx.slopes = _slopes(head, own, sums, unit_GD, whole)
            grad_unit_GD = _feature_gradient(head, own, sums, ctx.slopes, whole.share)
            grad_feat_GD = unit_backward(grad_unit_GD, unit_GD, norm_G1)
            ctx.features = head.world.start_reduce_scatter(grad_feat_GD, batch.rows, name="head/features")
            ctx.dtype = feat_BD.dtype
            head.learn_hard_negatives(batch.label_G, unit_GD, part)  # while they travel
        return whole.loss_G.mean().to(head.dtype)

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        pending = Pending(ctx.logits, ctx.slopes, ctx.rows)
        pending.scale(grad_loss)
        ctx.head.pending.append(pending)
        return (ctx.features.wait() * grad_loss).to(ctx.dtype), None, None


class _Own:
    """The rows of the global batch whose class is on this rank (N of them), and their own cosines and logits."""

    def __init__(
        self,
        head: "PartialFC",
        label_G: Tensor,
        unit_GD: Tensor,
        rows: Tensor | None,
        table: Tensor,
        row_S: Tensor | None,
    ):
        local_G = label_G - head.shard.start
        self.index_N = ((local_G >= 0) & (local_G < len(head.shard))).nonzero().squeeze(1)
        first_N = local_G[self.index_N] * head.sub_centres
        if rows is not None:
            first_N = torch.searchsorted(rows, first_N)
        place_NM = first_N[:, None] + torch.arange(head.sub_centres, device=first_N.device)
        in_table_NM = place_NM if row_S is None else row_S[place_NM]
        hat_NMD = unit(table[in_table_NM.flatten()].to(unit_GD.dtype))[0].unflatten(0, place_NM.shape)
        cos_NM = (unit_GD[self.index_N][:, None] * hat_NMD).sum(dim=2)
        self.cos_N, nearest_N = cos_NM.max(dim=1)
        self.hat_ND = hat_NMD[torch.arange(len(nearest_N)), nearest_N]
        self.place_G = torch.full_like(label_G, -1)
        self.place_G[self.index_N] = place_NM[torch.arange(len(nearest_N)), nearest_N]

    def apply_margin(self, head: "PartialFC", norm_G: Tensor) -> None:
        """Own logits and their slopes by the own cosine: logit_N, slope_N."""
        norm_N = norm_G[self.index_N]
        self.logit_N, self.slope_N = value_and_slope(head.margin, self.cos_N, norm_N, head.margin_state)

    def spread(self, value_N: Tensor) -> Tensor:
        """(G,), 0 where another rank has the class."""
        return value_N.new_zeros(len(self.place_G)).index_copy_(0, self.index_N, value_N)


@dataclass(frozen=True)
class _Whole:
    """What only all ranks together know, float64."""

    denominator_G: Tensor
    own_logit_G: Tensor
    loss_G: Tensor
    share: float  # of the target that every class gets by label smoothing


def _reduce(head: "PartialFC", own: _Own, sums: Sums, unit_GD: Tensor, num_sampled: int) -> _Whole:
    """The step's one reduction: sums of exp(logit), own logits; with label smoothing also the sum of a row's logits
    and the number of classes."""
    logit_N = own.logit_N.double()
    columns = [sums.denominator_G + own.spread(logit_N.exp()), own.spread(logit_N)]
    if sums.total_D is not None:
        with_margin_G = own.spread(logit_N - head.margin.scale * own.cos_N.double())
        columns += [head.margin.scale * (unit_GD @ sums.total_D).double() + with_margin_G]
        columns += [torch.full_like(with_margin_G, num_sampled)]
    reduced = head.world.all_reduce(torch.stack(columns, dim=1), name="head/softmax").unbind(dim=1)
    denominator_G, own_logit_G = reduced[:2]
    loss_G = denominator_G.log() - (1 - head.label_smoothing) * own_logit_G
    if sums.total_D is None:
        return _Whole(denominator_G, own_logit_G, loss_G, 0.0)
    share = head.label_smoothing / reduced[3][0].item()
    return _Whole(denominator_G, own_logit_G, loss_G - share * reduced[2], share)


def _slopes(head: "PartialFC", own: _Own, sums: Sums, unit_GD: Tensor, whole: _Whole) -> Slopes:
    """d(loss)/d(cosine)."""
    scale, num_rows, share = head.margin.scale, len(unit_GD), whole.share
    factor_G = scale / (num_rows * whole.denominator_G)
    # expm1, not exp - 1: near the end of training p is close to 1 and the difference is what is left to learn.
    log_p_G = whole.own_logit_G - whole.denominator_G.log()
    away_N = torch.expm1(log_p_G)[own.index_N] + (head.label_smoothing - share)
    own_N = (away_N * own.slope_N + share * scale) / num_rows  # all_D counts the own class like the others
    all_D = unit_GD.sum(dim=0).mul_(-share * scale / num_rows) if share else None
    return Slopes(factor_G, own.spread(own_N.to(unit_GD.dtype)), all_D, sums.kept)


def _feature_gradient(head: "PartialFC", own: _Own, sums: Sums, slopes: Slopes, share: float) -> Tensor:
    """d(loss)/d(unit features), this rank's part, (G, D); takes sums.pull_GD over."""
    assert sums.pull_GD is not None
    weight_G = slopes.factor_G * sums.denominator_G
    grad_GD = sums.pull_GD.mul_(weight_G[:, None])
    if sums.total_D is not None:
        grad_GD -= sums.total_D * (share * head.margin.scale / len(grad_GD))
    return grad_GD.index_add_(0, own.index_N, own.hat_ND * slopes.own_G[own.index_N][:, None])
