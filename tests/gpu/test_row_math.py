"""What lies between the Triton kernel's passes, beside PyTorch's operations: the rows' mathematics, and the choice.

On a CUDA device, or, with TRITON_INTERPRET=1, on the CPU (tests/unit/kernels/test_triton.py does that).
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from partial_fc.head import ArcFace, CombinedMargin, CosFace, HardNegatives
from partial_fc.head.kernels import Sums
from partial_fc.head.kernels.triton_choice import DeviceChoice
from partial_fc.head.kernels.triton_rows import FusedRowMath
from partial_fc.head.margin import EDGE
from partial_fc.head.rows import RowSGD, RowTable, Storage
from partial_fc.head.selection.active_rows import RowSelector
from partial_fc.head.selection.sampling import BLOCK, Draw
from partial_fc.head.shard import Shard
from partial_fc.head.softmax import RowMath
from tests.gpu.test_triton import DEVICE, pytestmark  # noqa: F401
from tests.unit.kernels.test_cpu_rows import SHARD, G, check_rows, check_that_nothing_is_hidden, problem

FP32 = torch.float32
D = 24


@pytest.mark.parametrize(
    ("sub_centres", "sampled", "narrow", "stored"),
    [
        (1, True, torch.float32, torch.bfloat16),
        (1, False, torch.float16, torch.float32),
        (3, True, *[torch.float32] * 2),
    ],
    ids=str,
)
def test_rows_are_those_of_float64(sub_centres, sampled, narrow, stored):
    feat_GD, label_G, active = problem(D, sub_centres, sampled, stored, DEVICE)
    outcome = check_rows(FusedRowMath(), feat_GD.to(narrow), label_G, active, sub_centres)
    assert outcome.logit_grad.factor_G[7] == 0  # where nothing of this rank has a part


def test_what_is_too_long_or_not_a_number_is_not_hidden():
    check_that_nothing_is_hidden(FusedRowMath(), DEVICE)


@pytest.mark.parametrize("margin", [CosFace(30.0), ArcFace(), CombinedMargin(m2=0.3, m3=0.2, straight_through=True)])
def test_margins_are_those_of_float64(margin):
    """At the ends, too, where the angle has no slope, beyond them, where a cosine is by rounding, and for NaN."""
    feat_GD, label_G, active = problem(D, device=DEVICE)
    targets = FusedRowMath().find_targets(feat_GD, label_G, SHARD, 1, active, FP32)
    edges = [1.0, EDGE, -EDGE, -1.0, 1.0 + 2**-23, -1.0 - 2**-22, 0.0, torch.nan]
    targets.cos_G[: len(edges)] = torch.tensor(edges, device=DEVICE)
    wide = replace(targets, cos_G=targets.cos_G.double(), norm_G1=targets.norm_G1.double())
    ours, exact = FusedRowMath().with_margin(margin, targets, {}), RowMath().with_margin(margin, wide, {})
    for found, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("log_probability", [-1e-14, -1e-7, -0.3, -0.7, -40.0, -800.0])
def test_what_is_left_to_learn_is_exact(log_probability):
    """1 - p, of which the difference of two numbers near 1 would leave nothing."""
    feat_GD, label_G, active = problem(D, device=DEVICE)
    rows = FusedRowMath()
    targets = rows.find_targets(feat_GD, label_G, SHARD, 1, active, torch.float32)
    target_logit_G = torch.full((G,), log_probability, dtype=torch.float64, device=DEVICE)
    terms = torch.stack((torch.ones_like(target_logit_G), target_logit_G), dim=1)
    sums = Sums(torch.ones_like(target_logit_G), torch.zeros_like(targets.unit_GD))
    grad_G = rows.finish(terms, targets, torch.ones_like(targets.cos_G), sums, 64.0, True).logit_grad.target_grad_G
    expected = torch.expm1(target_logit_G[0]) / G
    torch.testing.assert_close(grad_G[~targets.elsewhere_G].double().unique(), expected[None], rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("num_classes", "rate"), [(2 * BLOCK + 50, 0.1), (2, 0.5), (3 * BLOCK, 0.37)])
def test_the_classes_chosen_are_those_of_the_host(num_classes, rate, rank):
    """With lists of hard negatives; also where prepared walks begin and end."""
    shard, sampling = Shard.of(num_classes, rank, 3), Draw(num_classes, rate, 5)
    generator = torch.Generator().manual_seed(1)
    lists = HardNegatives(num_classes, k=2, device=DEVICE)
    near = torch.randint(-1, num_classes, (num_classes, 2), generator=generator, dtype=torch.int32)
    lists.load_state({"owner": torch.arange(num_classes, dtype=torch.int32), "near": near})
    table = RowTable(shard.start, len(shard), 4, 0, RowSGD(), Storage(), DEVICE)
    host = RowSelector(sampling, shard, 1, table, lists)
    choice = DeviceChoice(sampling, shard, DEVICE)
    for step in (0, 1, 31, 32, 7):  # back, as after a restart
        label_G = torch.randint(0, num_classes, (37,), generator=generator).to(DEVICE)
        origin_G = torch.zeros(37, 2, dtype=torch.int32, device=DEVICE)
        origin_G[5:9, 1] = 1
        expected_G, listed_M = torch.zeros(37, dtype=torch.int32, device=DEVICE), lists.listed(label_G)
        if step == 1:  # anything may arrive: nothing of it is taken for a class here
            listed_M[:2] = torch.tensor([-1, num_classes])
        numbers, chosen = choice.choose(label_G, origin_G[:, 1], expected_G, listed_M, step)
        *facts, count = numbers.tolist()
        assert facts == [int(label_G.min()), int(label_G.max()), 4]
        if step == 1:
            continue
        ours, expected = host.fetch(chosen, step, count), host.fetch(host.choose(label_G, step), step)
        assert torch.equal(ours.rows, expected.rows)
