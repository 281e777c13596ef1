"""`python -m benchmarks.head`: what it compares with computes the same as the reference, and flags that mean nothing
are refused. (Sharded: tests/parallel/head/test_bench_sides.py.) And `make bench-gpu`, the last layer beside others:
speed needs a GPU; that each side trains is seen without one."""

import pytest
import torch

from benchmarks import gpu_versus
from benchmarks.baselines import PlainHead, TorchHead
from benchmarks.gpu_versus import VersusOptions, versus
from partial_fc.head import CosFace
from tests import head_reference as reference
from tests.flat import learn

SCALE = 16.0


def step_of(head, weight_CD, feat_GD, label_G):
    """(loss, the features' gradient, the centres afterwards)."""
    head.weight_LD.copy_(weight_CD)
    leaf_GD = feat_GD.clone().requires_grad_()
    return learn(head, leaf_GD, label_G), leaf_GD.grad, head.weight_LD.clone()


def problem(num_rows=13):
    torch.manual_seed(0)
    weight_CD = torch.nn.functional.normalize(torch.randn(101, 19))
    return weight_CD, torch.randn(num_rows, 19), torch.randint(0, 101, (num_rows,))


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_plain_computes_what_the_reference_does(rate):
    weight_CD, feat_GD, label_G = problem()
    head = PlainHead(101, 19, CosFace(SCALE), rate)
    loss, grad_GD, after_CD = step_of(head, weight_CD, feat_GD, label_G)
    expected_GD, expected_CD = feat_GD.clone().requires_grad_(), weight_CD.clone().requires_grad_()
    wanted = reference.loss(expected_GD, label_G, expected_CD, CosFace(SCALE), head.index_S)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(grad_GD, expected_GD.grad)
    rows = torch.arange(101) if head.index_S is None else head.index_S
    assert set(label_G.tolist()) <= set(rows.tolist())
    moved_CD = weight_CD.clone()
    moved_CD[rows] -= 0.1 * (expected_CD.grad + 5e-4 * weight_CD)[rows]
    torch.testing.assert_close(after_CD, moved_CD)


@pytest.mark.parametrize("num_rows", [13, 1100])
def test_torch_computes_what_the_reference_does_without_margin_and_lengths(num_rows):
    """Centres of length 1 at the start; the gradient along a centre, which the reference does not have, is taken out.
    1,100 rows: in chunks."""
    weight_CD, feat_GD, label_G = problem(num_rows)
    loss, grad_GD, after_CD = step_of(TorchHead(101, 19, CosFace(SCALE)), weight_CD, feat_GD, label_G)
    expected_GD, expected_CD = feat_GD.clone().requires_grad_(), weight_CD.clone().requires_grad_()
    wanted = reference.loss(expected_GD, label_G, expected_CD, CosFace(SCALE, 0.0))
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(grad_GD, expected_GD.grad)
    grad_CD = (weight_CD - after_CD) / 0.1 - 5e-4 * weight_CD
    across_CD = grad_CD - (grad_CD * weight_CD).sum(dim=1, keepdim=True) * weight_CD
    torch.testing.assert_close(across_CD, expected_CD.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [PlainHead, TorchHead])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_momentum_stays_with_its_rows(kind, rate):
    """Over three steps as in PartialFC: rows that do not take part rest, momentum and all."""
    weight_CD, feat_GD, label_G = problem()
    head = kind(101, 19, CosFace(SCALE), rate)
    head.weight_LD.copy_(weight_CD)
    dense_CD, momentum_CD = weight_CD.clone(), torch.zeros(101, 19)
    for _ in range(3):
        head(feat_GD.clone().requires_grad_(), label_G).backward()
        rows = torch.arange(101) if head.index_S is None else head.index_S
        momentum_CD[rows] = 0.9 * momentum_CD[rows] + head.parameter_SD.grad + 5e-4 * dense_CD[rows]
        dense_CD[rows] -= 0.1 * momentum_CD[rows]
        head.step(0.1)
    torch.testing.assert_close(head.weight_LD, dense_CD)


def test_every_side_trains_or_says_why_not(capsys):
    options = VersusOptions(classes=50, batch=8, dims=(16,), rounds=1, device="cpu")
    lines = versus(options)
    said = capsys.readouterr().out
    assert [line["side"].split()[0] for line in lines] == [
        "PartialFC", "F.linear,", "F.linear_cross_entropy,", "F.linear_cross_entropy,", "QuACK", "Liger",
    ]  # fmt: skip
    for line in lines:
        assert line["operands"] == line["storage"] == "fp32"
        assert line["side"] in said
        assert ("step_ms" in line) != ("pip install" in line.get("problem", "")), line
    assert all("step_ms" in line for line in lines[:4])

    sides = gpu_versus._sides(options, 16)[:4]
    first = [side.step().item() for side in sides]
    for _ in range(30):
        last = [side.step().item() for side in sides]
    assert first[1:] == pytest.approx([first[1]] * 3, rel=1e-5), "one loss: written out, as a whole, in chunks"
    assert all(after < before for before, after in zip(first, last, strict=True))
