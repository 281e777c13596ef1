"""Margins: the formulas of the papers, and slopes that are the slopes of those formulas."""

import math

import pytest
import torch

from partial_fc.head.margin import ArcFace, CombinedMargin, CosFace, Negatives, Softmax, value_and_slope
from partial_fc.head.margin_adaptive import AdaFace
from partial_fc.head.margin_curricular import CurricularFace, HardCosines

COS = torch.linspace(-0.99, 0.99, 199, dtype=torch.float64)
LENGTH = torch.linspace(1.0, 60.0, 199, dtype=torch.float64)
ALL = [
    ArcFace(64.0, 0.5),
    CosFace(64.0, 0.4),
    CombinedMargin(32.0, 1.35, 0.1, 0.2),
    Softmax(16.0),
    AdaFace(64.0),
    CurricularFace(64.0),
]
BUSY = {"mean": 25.0, "deviation": 6.0, "t": 0.4}  # a state in the middle of training


def target(margin, cos: torch.Tensor, length: torch.Tensor = LENGTH) -> torch.Tensor:
    return margin.target(cos, length.expand(cos.shape), BUSY)


def test_values_are_those_of_the_papers():
    theta = torch.acos(COS)
    torch.testing.assert_close(target(ArcFace(64.0, 0.5), COS), torch.cos(theta + 0.5))
    torch.testing.assert_close(target(CosFace(64.0, 0.4), COS), COS - 0.4)
    torch.testing.assert_close(target(CombinedMargin(32.0, 1.35, 0.1, 0.2), COS), torch.cos(1.35 * theta + 0.1) - 0.2)
    torch.testing.assert_close(target(Softmax(16.0), COS), COS)


def test_adaface_by_hand():
    margin = AdaFace(64.0, m=0.4, h=0.333)
    for cos, length in ((0.3, 31.0), (0.3, 10.0), (-0.5, 90.0), (0.9, 0.0)):
        quality = max(-1.0, min(1.0, (max(length, 0.001) - 25.0) / (6.0 + 1e-3) * 0.333))
        by_hand = math.cos(math.acos(cos) - 0.4 * quality) - (0.4 + 0.4 * quality)
        value = target(margin, torch.tensor([cos], dtype=torch.float64), torch.tensor([length]))
        assert abs(value.item() - by_hand) < 1e-12


def test_adaface_keeps_the_angle_between_zero_and_pi():
    margin = AdaFace(64.0)
    near = torch.tensor([math.cos(0.1)], dtype=torch.float64)
    value, slope = value_and_slope(margin, near, torch.tensor([100.0]), BUSY)  # a long feature: theta - 0.4
    assert abs(value.item() / 64 - (1.0 - 0.8)) < 1e-12
    assert slope.item() == 0
    value, slope = value_and_slope(margin, -near, torch.tensor([0.1]), BUSY)  # a short one: theta + 0.4
    assert abs(value.item() / 64 - (-1.0 - 0.0)) < 1e-12
    assert slope.item() == 0


def test_adaface_remembers_mean_and_deviation_of_the_lengths():
    margin = AdaFace(64.0)
    state = margin.state()
    assert state == {"mean": 20.0, "deviation": 100.0}
    length_G = torch.tensor([10.0, 20.0, 60.0])
    state = margin.advance(state, length_G, None)
    assert abs(state["mean"] - (0.99 * 20 + 0.01 * 30)) < 1e-12
    assert abs(state["deviation"] - (0.99 * 100 + 0.01 * math.sqrt(700))) < 1e-12
    for _ in range(3000):
        state = margin.advance(state, length_G, None)
    assert abs(state["mean"] - 30) < 1e-6
    assert abs(state["deviation"] - math.sqrt(700)) < 1e-6
    alone = margin.advance(state, torch.tensor([1e9]), None)
    assert alone["deviation"] == pytest.approx(state["deviation"]), "one row has no deviation"
    assert alone["mean"] == pytest.approx(0.99 * state["mean"] + 0.01 * 100), "limited as published"


def test_curricularface_by_hand():
    margin = CurricularFace(64.0, m=0.5)
    theta = torch.acos(COS)
    expected = torch.where(theta < math.pi - 0.5, torch.cos(theta + 0.5), COS - 0.5 * math.sin(0.5))
    torch.testing.assert_close(target(margin, COS), expected)

    target_cos_G = torch.tensor([0.9, -0.2, -0.95], dtype=torch.float64)
    negatives = margin.negatives(target_cos_G, {"t": 0.4})
    cos_GK = torch.linspace(-1, 1, 41, dtype=torch.float64).expand(3, -1)
    value, slope = negatives(cos_GK)
    hard = cos_GK > torch.cos(torch.acos(target_cos_G) + 0.5)[:, None]
    assert 0 < hard.sum() < hard.numel()
    torch.testing.assert_close(value, torch.where(hard, cos_GK * (0.4 + cos_GK), cos_GK))
    torch.testing.assert_close(slope, torch.where(hard, 0.4 + 2 * cos_GK, 1.0))


def test_curricularface_remembers_the_mean_target_cosine():
    margin = CurricularFace(64.0)
    state = margin.advance(margin.state(), LENGTH, torch.tensor([0.5, 0.1]))
    assert abs(state["t"] - 0.01 * 0.3) < 1e-8
    for _ in range(3000):
        state = margin.advance(state, LENGTH, torch.tensor([0.5, 0.1]))
    assert abs(state["t"] - 0.3) < 1e-7


@pytest.mark.parametrize("margin", ALL, ids=str)
def test_slope_is_the_finite_difference(margin):
    value, slope = value_and_slope(margin, COS, LENGTH, BUSY)
    step = 1e-7
    difference = margin.scale * (target(margin, COS + step) - target(margin, COS - step)) / (2 * step)
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(value, margin.scale * target(margin, COS))
    assert not slope.requires_grad


@pytest.mark.parametrize("margin", ALL, ids=str)
def test_no_gradient_flows_through_the_lengths(margin):
    length = LENGTH.clone().requires_grad_()
    cos = COS.clone().requires_grad_()
    target(margin, cos, length).sum().backward()
    assert length.grad is None


@pytest.mark.parametrize(
    "negatives",
    [
        Negatives(),
        Negatives(filter_above=0.505),
        HardCosines(hard_G=torch.tensor([-0.1025]), t=0.3),
        HardCosines(filter_above=0.505, hard_G=torch.tensor([-0.1025]), t=0.3),
    ],
    ids=str,
)
def test_slope_of_the_negatives_is_the_finite_difference(negatives):
    cos_GK = COS[None]
    value, slope = negatives(cos_GK)
    step = 1e-6
    difference = (negatives(cos_GK + step)[0] - negatives(cos_GK - step)[0]) / (2 * step)
    stays = torch.isfinite(value)
    assert torch.equal(~stays, cos_GK > (negatives.filter_above or 2.0))
    slope = torch.ones_like(value) if slope is None else slope
    torch.testing.assert_close(slope[stays], difference[stays])


def test_straight_through_keeps_the_value_and_takes_the_slope_one():
    value, slope = value_and_slope(ArcFace(64.0, 0.5, straight_through=True), COS, LENGTH, {})
    torch.testing.assert_close(value, 64.0 * torch.cos(torch.acos(COS) + 0.5))
    assert torch.equal(slope, torch.full_like(COS, 64.0))


@pytest.mark.parametrize("margin", ALL, ids=str)
def test_finite_at_the_poles_and_a_rounding_error_beyond(margin):
    cos, length = torch.meshgrid(
        torch.tensor([-1.0, 1.0, -1.0000001, 1.0000001, 0.0]), torch.tensor([0.0, 25.0, 1e6]), indexing="ij"
    )
    value, slope = value_and_slope(margin, cos.flatten(), length.flatten(), BUSY)
    assert torch.isfinite(value).all()
    assert torch.isfinite(slope).all()
    assert value.abs().max() <= margin.scale * margin.bound * (1 + 1e-6)


@pytest.mark.parametrize("margin", ALL, ids=str)
def test_bound_holds_for_every_own_and_every_other_cosine(margin):
    cos = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    reached = 0.0
    for t in (-1.0, 0.0, 1.0):
        state = {**BUSY, "t": t}
        for length in (0.0, 25.0, 1e6):
            reached = max(reached, margin.target(cos, torch.full_like(cos, length), state).abs().max().item())
        negatives = margin.negatives(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64), state)
        reached = max(reached, negatives(cos.expand(3, -1))[0].abs().max().item())
    assert reached <= margin.bound + 1e-12
    assert reached > 0.9 * margin.bound


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (CombinedMargin, {"scale": 0.0}),
        (CombinedMargin, {"scale": -1.0}),
        (CombinedMargin, {"m1": 0.0}),
        (AdaFace, {"h": 0.0}),
        (AdaFace, {"weight": 0.0}),
        (CurricularFace, {"m": 2.0}),
        (CurricularFace, {"momentum": 1.0}),
    ],
)
def test_refuses_what_the_formula_does_not_allow(kind, options):
    with pytest.raises(ValueError, match=f"{kind.__name__} takes .*{next(iter(options))}|must be positive"):
        kind(**options)
