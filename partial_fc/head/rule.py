"""Rules: what the loss of a row is, given its labels' logits and the sum over all other classes.

Each is a function of 1 + T numbers a row, written once, as differentiable tensor maths in float64. So no label costs a
product or a softmax of its own.

Letters: G rows of the global batch, T labels of a row.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# Stands for a sum over no class at all, whose logarithm has no slope: below every sum of exp(logit), as logits are
# bounded by 600 (options.py).
_NOTHING = 1e-300


@dataclass(frozen=True)
class Labels:
    """The distinct labels of each row, float64. In places where a row has fewer than T: weight 0, `real_GT` False."""

    margin_GT: Tensor  # z: their logits with the margin; finite everywhere
    plain_GT: Tensor  # q: without it, as the logits of other classes are; -inf where filtered
    weight_GT: Tensor  # w: add up to 1 in each row
    real_GT: Tensor  # bool

    def sum_of_exp(self, logit_GT: Tensor) -> Tensor:
        """Returns the sum of exp(logit) over the other labels of a row, for each label: (G, T). No differences: a label
        whose own term is nearly all of the sum would leave nothing of it."""
        exp_GT = logit_GT.masked_fill(~self.real_GT, -torch.inf).exp()
        return exp_GT @ (1.0 - torch.eye(exp_GT.shape[1], dtype=exp_GT.dtype, device=exp_GT.device))

    def mean_loss(self, others_GT: Tensor) -> Tensor:
        """Returns the weighted mean of -log(e^z / (e^z + others)), (G,). As a log of a sigmoid, so that the gradient,
        1 - p, has all its digits where p is nearly 1."""
        margin_over_others_GT = self.margin_GT - others_GT.clamp(min=_NOTHING).log()
        return -(self.weight_GT * logsigmoid(margin_over_others_GT)).sum(dim=1)

    def log_pull(self) -> Tensor:
        """Returns log(sum of exp(-z)) over the labels of each row, (G,)."""
        return (-self.margin_GT).masked_fill(~self.real_GT, -torch.inf).logsumexp(dim=1)


@dataclass(frozen=True)
class Rule(ABC):
    """A rule for the loss of a row. In formulas: w_i the weights of its distinct labels (sum 1), z_i their logits with
    the margin, q_i without, N the sum of exp(logit) over all active classes that are no label of the row."""

    # Whether the loss of a row with one label is the softmax cross-entropy.
    one_label_is_softmax: ClassVar[bool] = True
    # Whether weights of labels have a meaning.
    has_weights: ClassVar[bool] = True

    @abstractmethod
    def loss(self, negative_sum_G: Tensor, labels: Labels) -> Tensor:
        """Returns the loss of each row, (G,), differentiable by N and by both kinds of logits."""


@dataclass(frozen=True)
class MeanSoftmax(Rule):
    """sum_i w_i [log(N + sum_{l != i} e^{q_l} + e^{z_i}) - z_i]: the mean of the losses that the row would have with
    each of its labels alone, so its other labels are negatives (https://github.com/EvolvingLMMs-Lab/OneVision-Encoder
    draws 8 of a row's labels and forms 8 softmaxes, each with negatives of its own)."""

    def loss(self, negative_sum_G: Tensor, labels: Labels) -> Tensor:
        return labels.mean_loss(negative_sum_G[:, None] + labels.sum_of_exp(labels.plain_GT))


@dataclass(frozen=True)
class OwnOut(Rule):
    """sum_i w_i [log(N + e^{z_i}) - z_i]: as MeanSoftmax, but a row's other labels are no negatives of it."""

    def loss(self, negative_sum_G: Tensor, labels: Labels) -> Tensor:
        return labels.mean_loss(negative_sum_G[:, None].expand_as(labels.margin_GT))


@dataclass(frozen=True)
class SoftTarget(Rule):
    """log(N + sum_i e^{z_i}) - sum_i w_i z_i: the cross-entropy with the weights as the target distribution."""

    def loss(self, negative_sum_G: Tensor, labels: Labels) -> Tensor:
        return labels.mean_loss(negative_sum_G[:, None] + labels.sum_of_exp(labels.margin_GT))


@dataclass(frozen=True)
class MLC(Rule):
    """log(1 + N * sum_i e^{-z_i}): every label above every other class (https://arxiv.org/abs/2407.17331)."""

    has_weights: ClassVar[bool] = False

    def loss(self, negative_sum_G: Tensor, labels: Labels) -> Tensor:
        return -logsigmoid(-(negative_sum_G.clamp(min=_NOTHING).log() + labels.log_pull()))


@dataclass(frozen=True)
class MLCD(Rule):
    """log(1 + N) + log(1 + sum_i e^{-z_i}): labels above 0, other classes below it, each by itself
    (https://arxiv.org/abs/2407.17331)."""

    one_label_is_softmax: ClassVar[bool] = False
    has_weights: ClassVar[bool] = False

    def loss(self, negative_sum_G: Tensor, labels: Labels) -> Tensor:
        return negative_sum_G.log1p() - logsigmoid(-labels.log_pull())
