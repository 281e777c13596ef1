"""The rules by themselves: their digits, their ends, and finite differences of the whole head. (Beside the dense
reference: tests/parallel/head/test_labels.py.)"""

import math

import pytest
import torch

from partial_fc.head import MLC, MLCD, MeanSoftmax, OwnOut, SoftTarget
from partial_fc.head.rule import Labels

RULES = [MeanSoftmax(), OwnOut(), SoftTarget(), MLC(), MLCD()]
each_rule = pytest.mark.parametrize("rule", RULES, ids=str)
F64 = torch.float64


def labels_of(margin_T: list[float], real_T: list[bool] | None = None) -> Labels:
    margin_GT = torch.tensor([margin_T], dtype=F64, requires_grad=True)
    real_GT = torch.tensor([real_T or [True] * len(margin_T)])
    plain_GT = (margin_GT.detach() + 1.0).masked_fill(~real_GT, -torch.inf)
    return Labels(margin_GT, plain_GT, real_GT / real_GT.sum(), real_GT)


@pytest.mark.parametrize("rule", RULES[:4], ids=str)
@pytest.mark.parametrize("log_others", [-40.0, -20.0, 0.0, 300.0])
def test_what_is_left_to_learn_has_all_its_digits(rule, log_others):
    """1 - p of one label: the difference of two numbers near 1 would leave nothing of it."""
    labels = labels_of([0.0])
    loss_G = rule.loss(torch.tensor([log_others], dtype=F64).exp(), labels)
    (grad_GT,) = torch.autograd.grad(loss_G.sum(), labels.margin_GT)
    missing = math.exp(log_others) / (1 + math.exp(log_others)) if log_others < 0 else 1 / (1 + math.exp(-log_others))
    assert abs(grad_GT.item() + missing) <= 4e-16 * missing


@each_rule
def test_the_others_of_a_label_are_added_and_not_subtracted(rule):
    """One label's exponential is 1e26 times the other's."""
    labels = labels_of([60.0, 0.0])
    loss_G = rule.loss(torch.tensor([1e-9], dtype=F64), labels)
    expected = {
        "MeanSoftmax()": (math.log1p((1e-9 + math.e) * math.exp(-60)) + math.log(1 + 1e-9 + math.exp(61))) / 2,
        "OwnOut()": (1e-9 * math.exp(-60) + math.log1p(1e-9)) / 2,
        "SoftTarget()": math.log(math.exp(60) + 1) - 30,
        "MLC()": math.log1p(1e-9 * (1 + math.exp(-60))),
        "MLCD()": math.log1p(1e-9) + math.log(2 + math.exp(-60)),
    }[str(rule)]
    assert abs(loss_G.item() - expected) < 1e-14 * max(1.0, expected)


@each_rule
@pytest.mark.parametrize("bound", [-590.0, 590.0])
def test_no_logit_overflows_and_no_class_at_all_is_no_nan(rule, bound):
    """Also where a row has one real label beside a filler."""
    for negative_sum in (0.0, math.exp(-590.0), math.exp(600.0)):
        labels = labels_of([bound, 3.0, 7.0], [True, False, True])
        sum_G = torch.tensor([negative_sum], dtype=F64, requires_grad=True)
        loss_G = rule.loss(sum_G, labels)
        assert loss_G.isfinite().all()
        for grad in torch.autograd.grad(loss_G.sum(), (sum_G, labels.margin_GT)):
            assert grad.isfinite().all()
        assert torch.autograd.grad(rule.loss(sum_G, labels).sum(), labels.margin_GT)[0][0, 1] == 0


@each_rule
def test_what_is_no_number_shows(rule):
    assert rule.loss(torch.tensor([torch.nan], dtype=F64), labels_of([0.0, 1.0])).isnan().all()
    assert rule.loss(torch.ones(1, dtype=F64), labels_of([0.0, torch.nan])).isnan().all()
