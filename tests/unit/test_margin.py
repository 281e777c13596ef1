"""Margins: the formulas of the papers, and slopes that are the slopes of those formulas."""

import math

import pytest
import torch

from partial_fc.head.margin import ArcFace, CombinedMargin, CosFace, Softmax, value_and_slope

COS = torch.linspace(-0.99, 0.99, 199, dtype=torch.float64)
ALL = [ArcFace(64.0, 0.5), CosFace(64.0, 0.4), CombinedMargin(32.0, 1.35, 0.1, 0.2), Softmax(16.0)]


def test_values_are_those_of_the_papers():
    theta = torch.acos(COS)
    torch.testing.assert_close(ArcFace(64.0, 0.5)(COS), torch.cos(theta + 0.5))
    torch.testing.assert_close(CosFace(64.0, 0.4)(COS), COS - 0.4)
    torch.testing.assert_close(CombinedMargin(32.0, 1.35, 0.1, 0.2)(COS), torch.cos(1.35 * theta + 0.1) - 0.2)
    torch.testing.assert_close(Softmax(16.0)(COS), COS)


@pytest.mark.parametrize("margin", ALL, ids=str)
def test_slope_is_the_finite_difference(margin):
    value, slope = value_and_slope(margin, COS)
    step = 1e-6
    difference = margin.scale * (margin(COS + step) - margin(COS - step)) / (2 * step)
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(value, margin.scale * margin(COS))
    assert not slope.requires_grad


def test_arcface_slope_reaches_far_from_the_scale():
    """The slope that some implementations replace by the scale goes from negative to above it."""
    _, slope = value_and_slope(ArcFace(64.0, 0.5), COS)
    assert slope.min() < 0
    assert slope.max() > 200


def test_straight_through_keeps_the_value_and_takes_the_slope_one():
    value, slope = value_and_slope(ArcFace(64.0, 0.5, straight_through=True), COS)
    torch.testing.assert_close(value, 64.0 * torch.cos(torch.acos(COS) + 0.5))
    assert torch.equal(slope, torch.full_like(COS, 64.0))


@pytest.mark.parametrize("margin", ALL, ids=str)
@pytest.mark.parametrize("cos", [-1.0, 1.0, -1.0000001, 1.0000001, 0.0])
def test_finite_at_the_poles_and_a_rounding_error_beyond(margin, cos):
    value, slope = value_and_slope(margin, torch.tensor([cos]))
    assert torch.isfinite(value).all()
    assert torch.isfinite(slope).all()
    assert abs(float(value)) <= margin.scale * margin.bound * (1 + 1e-6)


def test_value_at_the_pole_is_the_limit():
    value, _ = value_and_slope(ArcFace(64.0, 0.5), torch.tensor([1.0]))
    assert abs(float(value) - 64 * math.cos(0.5)) < 0.02


@pytest.mark.parametrize("options", [{"scale": 0.0}, {"scale": -1.0}, {"m1": 0.0}])
def test_refuses_what_is_no_margin(options):
    with pytest.raises(ValueError, match="must be positive"):
        CombinedMargin(**options)
