"""Values by step: which they are, what is no schedule. (Heads on several ranks: tests/parallel/head/test_steps.py.)"""

import copy
import logging
import pickle

import pytest
import torch

from partial_fc import linear_partial_cross_entropy
from partial_fc.head import ArcFace, CosFace, HardNegatives, PartialFC, Softmax, Steps
from partial_fc.head.margin_adaptive import AdaFace
from tests.flat import flat_head


def test_a_value_holds_until_the_next():
    values = Steps({0: 0.3, 2: 0.5, 7: 1.0})
    assert [values.at(step) for step in range(9)] == [0.3, 0.3, *[0.5] * 5, 1.0, 1.0]
    assert [values.next_change(step) for step in (0, 2, 6, 7)] == [2, 7, 7, None]


@pytest.mark.parametrize("steps", [{}, {1: 0.3}, {0: 0.3, 5: 0.4, 3: 0.5}, {0: 0.1, -1: 0.2}])
def test_steps_out_of_order_are_refused(steps):
    with pytest.raises(ValueError, match="expected 0 and then later steps, ascending"):
        Steps(steps)


@pytest.mark.parametrize(
    ("margin", "rate", "options", "words"),
    [
        ("cosface", Steps({0: 0.5, 3: 0.0}), {}, "sample_rate is 0.0"),
        ("cosface", Steps({0: 1.0, 3: 1.0}), {"hard_negatives": HardNegatives(50, 2)}, "without sampling"),
        (Steps({0: CosFace(), 3: CosFace(1000.0)}), 1.0, {}, "choose a smaller scale"),
        (Steps({0: CosFace(), 3: AdaFace()}), 1.0, {}, "margins of several kinds"),
        (Steps({0: CosFace(), 3: "arcfac"}), 1.0, {}, "margin is 'arcfac'"),
    ],
)
def test_every_value_of_a_head_is_checked(margin, rate, options, words):
    with pytest.raises(ValueError, match=words):
        flat_head(50, 4, margin, rate, **options)


def test_what_needs_sampling_takes_a_rate_that_becomes_one():
    lists = HardNegatives(50, 2)
    flat_head(50, 4, CosFace(), Steps({0: 0.5, 3: 1.0}), hard_negatives=lists)


def test_a_function_knows_no_step():
    feat, centre, label = torch.randn(2, 4), torch.randn(9, 4), torch.arange(2)
    with pytest.raises(ValueError, match="a function knows no step"):
        linear_partial_cross_entropy(feat, centre, label, "cosface", sample_rate=Steps({0: 0.5}))
    with pytest.raises(ValueError, match="expected a Margin"):
        linear_partial_cross_entropy(feat, centre, label, Steps({0: CosFace()}))


def train(head: PartialFC, steps: int) -> None:
    for _ in range(steps):
        head(torch.randn(6, 4).requires_grad_(), torch.arange(6)).backward()
        head.step(0.1)


def test_the_log_says_where_a_value_changes(caplog):
    head = PartialFC(90, 4, Steps({0: Softmax(), 3: ArcFace(margin=0.25)}), Steps({0: 0.5, 2: 1.0, 3: 1.0}))
    with caplog.at_level(logging.INFO):
        train(head, 5)
    (rate, margin) = caplog.messages
    assert rate == "head, step 3: sample rate 1.0, before 0.5"
    assert margin.startswith("head, step 4: margin CombinedMargin(")
    assert "m2=0.25" in margin


def test_copies_have_the_schedule():
    head = PartialFC(90, 4, Steps({0: Softmax(), 1: ArcFace()}), Steps({0: 0.5, 2: 1.0}))
    train(head, 1)
    for twin in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert twin.margin == ArcFace()
        assert [twin.draw.rates.at(step) for step in (1, 2)] == [0.5, 1.0]
    head.resize(80)
    assert head.margin == ArcFace()
    assert head.draw.rates.at(2) == 1.0
