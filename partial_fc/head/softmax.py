"""The softmax of the sharded head as pure functions of tensors: what lies between its collectives (partial_fc.py).

Letters: G rows of the global batch, N of them whose target class is on this rank, M sub-centres of a class, D feature
width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from partial_fc.head.active_rows import ActiveRows
from partial_fc.head.kernels import LogitGrad, Sums
from partial_fc.head.kernels.plain import unit
from partial_fc.head.shard import Shard


@dataclass(frozen=True)
class Targets:
    """The rows of the global batch whose target class is on this rank (N of them), with the nearest of its centres."""

    index_N: Tensor  # rows of the global batch
    cos_N: Tensor
    unit_ND: Tensor  # the centres, of length 1
    position_G: Tensor  # int64: of the centre among the active rows; -1: another rank has the class

    def spread(self, value_N: Tensor) -> Tensor:
        """Returns (G,), 0 where another rank has the class."""
        return value_N.new_zeros(len(self.position_G)).index_copy_(0, self.index_N, value_N)


def find_targets(label_G: Tensor, unit_GD: Tensor, shard: Shard, sub_centres: int, active: ActiveRows) -> Targets:
    local_G = label_G - shard.start
    index_N = ((local_G >= 0) & (local_G < len(shard))).nonzero().squeeze(1)
    first_N = local_G[index_N] * sub_centres
    if active.rows is not None:
        first_N = torch.searchsorted(active.rows, first_N)
    position_NM = first_N[:, None] + torch.arange(sub_centres, device=first_N.device)
    in_table_NM = position_NM if active.row_S is None else active.row_S[position_NM]
    unit_NMD = unit(active.table[in_table_NM.flatten()].to(unit_GD.dtype))[0].unflatten(0, position_NM.shape)
    cos_NM = (unit_GD[index_N][:, None] * unit_NMD).sum(dim=2)
    cos_N, nearest_N = cos_NM.max(dim=1)
    each_N = torch.arange(len(nearest_N))
    position_G = torch.full_like(label_G, -1)
    position_G[index_N] = position_NM[each_N, nearest_N]
    return Targets(index_N, cos_N, unit_NMD[each_N, nearest_N], position_G)


def local_terms(
    targets: Targets, target_logit_N: Tensor, sums: Sums, scale: float, unit_GD: Tensor, num_active: int
) -> Tensor:
    """This rank's part of what `global_softmax` takes, to be summed over the ranks: float64 (G, 2), the sum of
    exp(logit) and the target's logit; with label smoothing (G, 4), also the sum of a row's logits and the number of
    rows."""
    logit_N = target_logit_N.double()
    columns = [sums.denominator_G + targets.spread(logit_N.exp()), targets.spread(logit_N)]
    if sums.centre_sum_D is not None:
        margin_G = targets.spread(logit_N - scale * targets.cos_N.double())
        columns += [scale * (unit_GD @ sums.centre_sum_D).double() + margin_G, torch.full_like(margin_G, num_active)]
    return torch.stack(columns, dim=1)


@dataclass(frozen=True)
class GlobalSoftmax:
    """What only all ranks together know, float64."""

    denominator_G: Tensor
    target_logit_G: Tensor
    loss_G: Tensor
    smoothing: float  # the share of the target distribution that label smoothing gives to the target
    share: float  # and to every class


def global_softmax(terms: Tensor, label_smoothing: float) -> GlobalSoftmax:
    """terms: `local_terms`, summed over the ranks."""
    denominator_G, target_logit_G, *smoothed = terms.unbind(dim=1)
    loss_G = denominator_G.log() - (1 - label_smoothing) * target_logit_G
    if not smoothed:
        return GlobalSoftmax(denominator_G, target_logit_G, loss_G, label_smoothing, 0.0)
    logit_sum_G, count_G = smoothed
    share = label_smoothing / count_G[0].item()
    return GlobalSoftmax(denominator_G, target_logit_G, loss_G - share * logit_sum_G, label_smoothing, share)


def logit_gradient(
    softmax: GlobalSoftmax, targets: Targets, target_slope_N: Tensor, sums: Sums, scale: float, unit_GD: Tensor
) -> LogitGrad:
    """d(loss)/d(cosine). target_slope_N: d(target's logit)/d(its cosine)."""
    share, num_rows = softmax.share, len(softmax.loss_G)
    factor_G = scale / (num_rows * softmax.denominator_G)
    # expm1, not exp - 1: near the end of training p is close to 1 and the difference is what is left to learn.
    log_p_G = softmax.target_logit_G - softmax.denominator_G.log()
    missing_N = torch.expm1(log_p_G)[targets.index_N] + (softmax.smoothing - share)
    # uniform_D counts the target like the others.
    target_grad_N = (missing_N * target_slope_N + share * scale) / num_rows
    uniform_D = unit_GD.sum(dim=0).mul_(-share * scale / num_rows) if share else None
    return LogitGrad(factor_G, targets.spread(target_grad_N.to(unit_GD.dtype)), uniform_D, sums.cache)


def feature_gradient(
    softmax: GlobalSoftmax, targets: Targets, sums: Sums, logit_grad: LogitGrad, scale: float
) -> Tensor:
    """d(loss)/d(unit features), this rank's part, (G, D). Overwrites sums.weighted_sum_GD."""
    assert sums.weighted_sum_GD is not None
    weight_G = logit_grad.factor_G * sums.denominator_G
    grad_GD = sums.weighted_sum_GD.mul_(weight_G[:, None])
    if sums.centre_sum_D is not None:
        grad_GD -= sums.centre_sum_D * (softmax.share * scale / len(softmax.loss_G))
    target_grad_N = logit_grad.target_grad_G[targets.index_N]
    return grad_GD.index_add_(0, targets.index_N, targets.unit_ND * target_grad_N[:, None])
