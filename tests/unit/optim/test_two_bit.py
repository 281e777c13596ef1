"""MXNet's 2-bit codes: its bits, its rule, its numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from partial_fc import comm
from partial_fc.optim.compression import build_compressor
from partial_fc.optim.compression.two_bit import decode, encode_
from partial_fc.optim.gradient_sync import GradientSync


def filled_up(values: list[float]) -> torch.Tensor:
    """A multiple of 16 values, as encode_ wants them."""
    return torch.tensor(values + [0.0] * (-len(values) % 16))


def by_the_rule(owed: float, t: float) -> tuple[int, float, float]:
    """(code, what leaves, what stays) of one value."""
    if owed >= t:
        return 0b11, t, owed - t
    if owed <= -t:
        return 0b10, -t, owed + t
    return 0b00, 0.0, owed


def test_vector_of_mxnet():
    owed = filled_up([0.6, -0.7, 0.1, 0.5, -0.5, 2.0])
    code = encode_(owed, 0.5)
    assert bytes(code.tolist()) == bytes.fromhex("e3b00000")
    torch.testing.assert_close(owed[:6], torch.tensor([0.1, -0.2, 0.1, 0.0, 0.0, 1.5]))
    assert decode(code, 0.5)[:6].tolist() == [0.5, -0.5, 0.0, 0.5, -0.5, 0.5]


@given(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=40), st.sampled_from([0.5, 0.25, 1.0]))
def test_codes_and_residuals_follow_the_rule(values, t):
    owed = filled_up(values)
    expected = [by_the_rule(value, t) for value in owed.tolist()]
    code = encode_(owed, t)
    assert len(code) == len(owed) // 4
    for i, (bits, _, _) in enumerate(expected):
        assert (code[i // 4].item() >> (6 - 2 * (i % 4))) & 3 == bits
    assert decode(code, t).tolist() == [left for _, left, _ in expected]
    assert owed.tolist() == [torch.tensor(stays).item() for _, _, stays in expected]


@pytest.mark.parametrize("bad", [None, 70_000])
def test_long_gradients_are_coded_like_short_ones(bad):
    owed = torch.linspace(-2, 2, 100_000)
    if bad is not None:
        owed[bad] = math.nan
    parts = [part.clone() for part in owed.split(16 * 999)]
    assert torch.equal(encode_(owed, 0.5), torch.cat([encode_(part, 0.5) for part in parts]))
    torch.testing.assert_close(owed, torch.cat(parts), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives_as_nan(value):
    code = encode_(filled_up([0.0, 0.6, value, -0.6]), 0.5)
    assert code.tolist() == [0b00_11_01_10, 0, 0, 0]
    decoded = decode(code, 0.5)
    assert math.isnan(decoded[2])
    assert decoded.nan_to_num(7.0).tolist() == [0.0, 0.5, 7.0, -0.5] + [0.0] * 12


def sync_of(*shapes, **options) -> tuple[dict[str, nn.Parameter], GradientSync]:
    named = {f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
    compressor = build_compressor("2bit", threshold=0.5)
    return named, GradientSync(named.items(), comm.SingleWorld(), compressor=compressor, **options)


def one_update(named, sync, gradient_of_mean, global_batch, loss_scale=1.0):
    sync.zero(loss_scale, global_batch)
    (loss_scale * sum((p * gradient_of_mean).sum() for p in named.values())).backward()
    sync.wait()


def test_state_goes_on_where_it_stopped():
    first, sync = sync_of((3, 5), (17,))
    one_update(first, sync, 0.1, global_batch=3)
    second, other = sync_of((3, 5), (17,), bucket_bytes=1)  # of another cut into buckets
    other.load_state(sync.state())
    for _ in range(3):
        one_update(first, sync, 0.1, global_batch=3)
        one_update(second, other, 0.1, global_batch=3)
        assert all(torch.equal(first[name].grad, second[name].grad) for name in first)
    assert any(p.grad.any() for p in first.values())


def test_state_of_another_network_is_refused():
    _, sync = sync_of((3, 5))
    state = sync.state()
    with pytest.raises(ValueError, match=r"has \[\], expected \['residual/p0'\]"):
        sync.load_state({})
    with pytest.raises(ValueError, match=r"q/p0.*another kind"):
        sync.load_state({**state, "q/p0": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"shape \(5, 3\) in the state; expected \(3, 5\)"):
        sync.load_state({"residual/p0": torch.zeros(5, 3)})


def test_what_cannot_work_is_refused():
    for threshold in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"threshold {threshold}"):
            build_compressor("2bit", threshold=threshold)
    _, sync = sync_of((3,))
    with pytest.raises(ValueError, match=r"2bit needs zero\(global_batch=\)"):
        sync.zero()
    with pytest.raises(ValueError, match="'1bit' is none of none, fp16, bf16, 2bit, powersgd"):
        build_compressor("1bit")
