"""The row-wise part of the sharded softmax, between the collectives of partial_fc.py.

Every one of the G rows of the global batch is computed here, also where another rank has its target class: shapes then
depend on no number that a device would have to be asked for, and masks take the place of row numbers. With several
labels (rule.py) every (row, label) is a target; what is (G,) here is then (G, T).

Letters: G rows of the global batch, T labels of a row, M sub-centres of a class, D feature width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partial_fc.head.kernels import LogitGrad, Sums, by_label
from partial_fc.head.kernels.unit import row_dots, unit, unit_backward
from partial_fc.head.margin import Margin, Negatives, State, value_and_slope
from partial_fc.head.rule import Labels, Rule
from partial_fc.head.selection.active_rows import ActiveRows
from partial_fc.head.shard import Shard


@contextmanager
def own_arithmetic(device: torch.device) -> Iterator[None]:
    """Switches autograd, autocast and inference mode off: the head computes gradients itself, in dtypes that it
    chooses."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@dataclass(frozen=True)
class Targets:
    """The features with the nearest centre of each one's target class. Rows whose class another rank stores are
    undefined."""

    unit_GD: Tensor  # the features, of length 1
    norm_G1: Tensor  # their former lengths
    elsewhere_G: Tensor  # bool: another rank has the class
    cos_G: Tensor
    # The centres, of length 1, (G, D) or (G, T, D); None: the row math reads them where they lie.
    centre_GD: Tensor | None
    position_G: Tensor  # int64: of the centre among the active rows; -1: another rank has the class

    def spread(self, value_G: Tensor) -> Tensor:
        """Returns 0 where another rank has the class."""
        return value_G.masked_fill(self.elsewhere_G, 0.0)

    def leave_out(self, out_GT: Tensor) -> None:
        """Takes out what only fills a row that has fewer than T labels: as if another rank had it."""
        self.elsewhere_G.logical_or_(out_GT)
        self.position_G.masked_fill_(out_GT, -1)


@dataclass(frozen=True)
class Outcome:
    """The result for a batch after the ranks have summed their terms: float64, equal on all of them, but for the
    gradients, which are None where nothing learns."""

    loss_G: Tensor
    logit_grad: LogitGrad | None = None
    grad_feat_GD: Tensor | None = None  # this rank's part of d(loss)/d(features), in unit_GD's dtype

    def weighed(self, weight_G: Tensor) -> "Outcome":
        """Returns it with each row's loss times its weight, float64. Overwrites the gradients."""
        loss_G, grad, feat = self.loss_G * weight_G, self.logit_grad, self.grad_feat_GD
        if grad is None or feat is None:
            return replace(self, loss_G=loss_G)
        feat.mul_(weight_G[:, None])
        by_label(grad.target_grad_G).mul_(weight_G[:, None])
        return replace(self, loss_G=loss_G, logit_grad=replace(grad, factor_G=grad.factor_G * weight_G))


class RowMath:
    """The row-wise computations in PyTorch's operations, for any device and dtype. kernels/cpu_rows.py and
    kernels/triton_rows.py fuse them."""

    def find_targets(
        self, feat_GD: Tensor, label_G: Tensor, shard: Shard, sub_centres: int, active: ActiveRows, dtype: torch.dtype
    ) -> Targets:
        """Finds the nearest target centre of each feature. label_G: (G,) or (G, T). dtype: of the computation."""
        unit_GD, norm_G1 = unit(feat_GD.to(dtype))
        local_G, elsewhere_G = shard.locate(label_G)
        num_active = len(active.table) if active.row_S is None else len(active.row_S)
        if not num_active:
            nothing_G, nowhere_G = unit_GD.new_zeros(local_G.shape), torch.full_like(local_G, -1)
            nothing_GD = unit_GD.new_zeros(*local_G.shape, unit_GD.shape[1])
            return Targets(unit_GD, norm_G1, elsewhere_G, nothing_G, nothing_GD, nowhere_G)
        position_G = local_G if sub_centres == 1 else local_G * sub_centres
        if active.rows is not None:
            position_G = torch.searchsorted(active.rows, position_G).clamp_(max=num_active - sub_centres)
        position_GM = position_G[..., None]
        if sub_centres > 1:
            position_GM = position_GM + torch.arange(sub_centres, device=position_G.device)
        in_table = position_GM.flatten()
        if active.row_S is not None:
            in_table = active.row_S.index_select(0, in_table)
        centre = active.table.index_select(0, in_table).to(unit_GD.dtype)
        centre_GMD = unit(centre, out=centre)[0].unflatten(0, position_GM.shape)
        cos_GM = row_dots(unit_GD[:, None], centre_GMD.view(len(unit_GD), -1, unit_GD.shape[1])).view(position_GM.shape)
        if sub_centres == 1:
            cos_G, centre_GD = cos_GM[..., 0], centre_GMD[..., 0, :]
        else:
            cos_G, nearest_G = cos_GM.max(dim=-1)
            position_G = position_G + nearest_G
            centre_GD = torch.take_along_dim(centre_GMD, nearest_G[..., None, None], dim=-2).squeeze(-2)
        return Targets(unit_GD, norm_G1, elsewhere_G, cos_G, centre_GD, position_G.masked_fill(elsewhere_G, -1))

    def with_margin(self, margin: Margin, targets: Targets, state: State) -> tuple[Tensor, Tensor]:
        """Returns the targets' logits and their derivatives by the cosines."""
        return value_and_slope(margin, targets.cos_G, targets.norm_G1[:, 0], state)

    def local_terms(self, targets: Targets, target_logit_G: Tensor, sums: Sums) -> Tensor:
        """Returns this rank's terms, to be summed over the ranks for `finish`: float64 (G, 2), the sum of exp(logit)
        and the target's logit."""
        logit_G = target_logit_G.double()
        terms = torch.stack([logit_G.exp(), logit_G], dim=1).masked_fill_(targets.elsewhere_G[:, None], 0.0)
        terms[:, 0].add_(sums.denominator_G)
        return terms

    def finish(
        self, terms: Tensor, targets: Targets, target_slope_G: Tensor, sums: Sums, scale: float, training: bool
    ) -> Outcome:
        """Computes loss and gradients. terms: `local_terms`, summed over the ranks. Overwrites sums.weighted_sum_GD
        where `training`."""
        denominator_G, target_logit_G = terms.unbind(dim=1)
        log_denominator_G = denominator_G.log()
        loss_G = log_denominator_G - target_logit_G
        if not training:
            return Outcome(loss_G)
        num_rows = len(terms)
        factor_G = scale / (num_rows * denominator_G)
        # expm1, not exp - 1: near the end of training p is close to 1 and the difference is what is left to learn.
        slope_G = torch.expm1(target_logit_G - log_denominator_G).mul_(target_slope_G)
        target_grad_G = slope_G.div_(num_rows).to(targets.unit_GD.dtype).masked_fill_(targets.elsewhere_G, 0.0)
        assert sums.weighted_sum_GD is not None
        weight_G = (factor_G * sums.denominator_G).to(sums.weighted_sum_GD.dtype)
        grad_GD = self.feature_gradient(sums.weighted_sum_GD, weight_G, target_grad_G, targets)
        return Outcome(loss_G, LogitGrad(factor_G, target_grad_G, sums.cache), grad_GD)

    def label_terms(self, targets: Targets, sums: Sums) -> Tensor:
        """Returns this rank's terms by a rule, to be summed over the ranks for `finish_labels`: float64 (G, 1 + T), the
        sum of exp(logit) without the labels', and the labels' cosines."""
        return torch.cat([sums.denominator_G[:, None], targets.spread(targets.cos_G.double())], dim=1)

    def finish_labels(
        self,
        terms: Tensor,
        targets: Targets,
        weight_GT: Tensor,
        rule: Rule,
        margin: Margin,
        state: State,
        negatives: Negatives,
        sums: Sums,
        training: bool,
    ) -> Outcome:
        """Computes loss and gradients by the rule. terms: `label_terms`, summed over the ranks; weight_GT: float64, 0
        where a row has fewer labels. Overwrites sums.weighted_sum_GD where `training`."""
        num_rows, dtype = len(terms), targets.unit_GD.dtype
        with torch.set_grad_enabled(training):
            leaf = terms.requires_grad_(training)
            negative_sum_G, cos_GT = leaf[:, 0], leaf[:, 1:]
            norm_GT = targets.norm_G1.expand_as(cos_GT).flatten()
            margin_GT = margin.scale * margin.target(cos_GT.flatten(), norm_GT, state).view_as(cos_GT)
            plain_GT = margin.scale * negatives(cos_GT)[0]
            labels = Labels(margin_GT, plain_GT, weight_GT, weight_GT > 0)
            loss_G = rule.loss(negative_sum_G, labels)
            grad = torch.autograd.grad(loss_G.sum(), leaf)[0] if training else None
        loss_G = loss_G.detach()
        if grad is None:
            return Outcome(loss_G)
        assert sums.weighted_sum_GD is not None
        # A factor beyond float32, times nothing, would be no number.
        factor_G = (grad[:, 0] * (margin.scale / num_rows)).masked_fill(sums.denominator_G == 0.0, 0.0)
        target_grad_GT = targets.spread(grad[:, 1:] / num_rows).to(dtype)
        logit_grad = LogitGrad(factor_G, target_grad_GT, sums.cache)
        weight_G = (factor_G * sums.denominator_G).to(dtype)
        grad_GD = self.feature_gradient(sums.weighted_sum_GD, weight_G, target_grad_GT, targets)
        return Outcome(loss_G, logit_grad, grad_GD)

    def feature_gradient(
        self, weighted_sum_GD: Tensor, weight_G: Tensor, target_grad_G: Tensor, targets: Targets
    ) -> Tensor:
        """Returns this rank's part of d(loss)/d(features), (G, D): that of the negatives is weight_G times
        weighted_sum_GD. Overwrites weighted_sum_GD."""
        assert targets.centre_GD is not None
        grad_GD = weighted_sum_GD.mul_(weight_G[:, None])
        centre_GTD = targets.centre_GD.view(len(grad_GD), -1, grad_GD.shape[1])
        for label, own_G in enumerate(by_label(target_grad_G).unbind(dim=1)):
            grad_GD.addcmul_(centre_GTD[:, label], own_G[:, None])
        return unit_backward(grad_GD, targets.unit_GD, targets.norm_G1)
