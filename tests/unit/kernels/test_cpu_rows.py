"""The C++ mathematics of a batch's rows, beside PyTorch's operations in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from partial_fc.head.kernels import Sums
from partial_fc.head.kernels.cpu import CpuKernel
from partial_fc.head.selection.active_rows import ActiveRows
from partial_fc.head.shard import Shard
from partial_fc.head.softmax import Outcome, RowMath

G, L, FIRST = 70, 300, 100
SHARD = Shard(FIRST, FIRST + L, 500)


def problem(width: int, sub_centres: int = 1, sampled: bool = False, stored: torch.dtype = torch.float32, device="cpu"):
    """Features, labels of this shard's classes and of others, centres; some are 0, and some features near to theirs."""
    generator = torch.Generator().manual_seed(5)
    feat_GD = torch.randn(G, width, generator=generator)
    label_G = torch.randint(0, 500, (G,), generator=generator)
    table = torch.randn(L * sub_centres, width, generator=generator) * 3
    feat_GD[4:12] = table[(label_G[4:12] - FIRST).clamp(0, L - 1) * sub_centres] * 1.5
    feat_GD[3] = 0.0
    table[::37] = 0.0
    table, rows, row_S = table.to(stored), None, None
    if sampled:  # what takes part lies in a table of its own, as from the host, in another order
        here = label_G[(label_G >= FIRST) & (label_G < FIRST + L)] - FIRST
        classes = torch.unique(torch.cat((here, torch.randperm(L, generator=generator)[:40])))
        rows = (classes[:, None] * sub_centres + torch.arange(sub_centres)).flatten()
        row_S = torch.arange(len(rows)).flip(0)
        table = table[rows].flip(0).contiguous()
    rows, table, row_S = (None if t is None else t.to(device) for t in (rows, table, row_S))
    return feat_GD.to(device), label_G.to(device), ActiveRows(rows, table, row_S)


def go(rows: RowMath, feat_GD: Tensor, label_G: Tensor, active: ActiveRows, sub_centres: int, dtype: torch.dtype):
    """What a step does with this mathematics, where a kernel has found some sums and the margin's slope is 50."""
    targets = rows.find_targets(feat_GD, label_G, SHARD, sub_centres, active, dtype)
    generator = torch.Generator().manual_seed(6)
    denominator_G = torch.rand(G, generator=generator, dtype=torch.float64) * 1e20
    denominator_G[7] = 0.0
    weighted_sum_GD = torch.randn(feat_GD.shape, generator=generator, dtype=torch.float64)
    sums = Sums(denominator_G.to(feat_GD.device), weighted_sum_GD.to(feat_GD.device, dtype))
    terms = rows.local_terms(targets, 64.0 * targets.cos_G, sums)
    terms[:, 0].add_(1.0)  # of another rank
    slope_G = torch.full_like(targets.cos_G, 50.0)
    return targets, terms.clone(), rows.finish(terms, targets, slope_G, sums, 64.0, training=True)


def check_rows(rows: RowMath, feat_GD: Tensor, label_G: Tensor, active: ActiveRows, sub_centres: int) -> Outcome:
    """Beside PyTorch's operations in float64. Returns what they give in float32."""
    ours, our_terms, outcome = go(rows, feat_GD, label_G, active, sub_centres, torch.float32)
    exact, terms, expected = go(RowMath(), feat_GD, label_G, active, sub_centres, torch.float64)
    here_G = (label_G >= FIRST) & (label_G < FIRST + L)
    assert torch.equal(ours.elsewhere_G, ~here_G)
    assert torch.equal(ours.position_G, exact.position_G)
    weighs_G = torch.arange(G) != 7  # where nothing of this rank has a part any factor weighs as nothing

    def same(found: Tensor, exact: Tensor, error: float) -> None:
        torch.testing.assert_close(found.double(), exact.double(), rtol=error, atol=error)

    same(ours.unit_GD, exact.unit_GD, 2e-6)
    same(ours.norm_G1, exact.norm_G1, 2e-6)
    same(ours.cos_G[here_G], exact.cos_G[here_G], 2e-6)
    # A logit is right to 64 times what a cosine is right to, and its exponential as much.
    same(our_terms, terms, 2e-5)
    same(outcome.loss_G, expected.loss_G, 5e-5)
    same(outcome.logit_grad.factor_G[weighs_G], expected.logit_grad.factor_G[weighs_G], 2e-5)
    same(outcome.logit_grad.target_grad_G, expected.logit_grad.target_grad_G, 2e-5)
    same(outcome.grad_feat_GD, expected.grad_feat_GD, 5e-5)
    assert outcome.grad_feat_GD[3].count_nonzero() == 0  # of a feature of length 0
    return outcome


def check_that_nothing_is_hidden(rows: RowMath, device: torch.device | str = "cpu") -> None:
    """What is too long for float32, or no number."""
    feat_GD, label_G, active = problem(24, device=device)
    label_G[:3] = torch.arange(FIRST, FIRST + 3)
    feat_GD[0], feat_GD[1, 2] = 2e19, torch.nan
    active.table[2, 0] = torch.inf
    targets = rows.find_targets(feat_GD, label_G, SHARD, 1, active, torch.float32)
    assert targets.unit_GD.isnan().any(dim=1).nonzero().flatten().tolist() == [0, 1]
    assert set(targets.cos_G.isnan().nonzero().flatten().tolist()) >= {0, 1, 2}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("variant", ["portable", None])
@pytest.mark.parametrize(
    ("width", "sub_centres", "sampled", "narrow", "stored"),
    [
        (24, 1, True, torch.float32, torch.bfloat16),
        (37, 1, False, torch.float16, torch.float32),
        (64, 3, True, torch.bfloat16, torch.float16),
        (5, 2, False, torch.float64, torch.float32),
    ],
    ids=str,
)
def test_rows_are_those_of_float64(width, sub_centres, sampled, narrow, stored, variant, threads):
    feat_GD, label_G, active = problem(width, sub_centres, sampled, stored)
    feat_GD = torch.cat((feat_GD, feat_GD), dim=1).to(narrow)[:, :width]  # rows with gaps, as they arrive
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_rows(CpuKernel("fp32", variant).row_math(), feat_GD, label_G, active, sub_centres)
    finally:
        torch.set_num_threads(before)


def test_what_is_too_long_or_not_a_number_is_not_hidden():
    check_that_nothing_is_hidden(CpuKernel("fp32").row_math())


def test_a_class_that_takes_no_part_is_named():
    feat_GD, label_G, active = problem(24, sampled=True)
    label_G[9] = FIRST + int((~torch.isin(torch.arange(L), active.rows)).nonzero()[0])
    with pytest.raises(RuntimeError, match=f"class {label_G[9]}, row 9 of the global batch, is not among the active"):
        CpuKernel("fp32").row_math().find_targets(feat_GD, label_G, SHARD, 1, active, torch.float32)


def test_a_rank_without_active_rows_adds_nothing():
    feat_GD, _, active = problem(24)
    label_G = torch.zeros(G, dtype=torch.int64)
    empty = replace(active, rows=torch.empty(0, dtype=torch.int64), row_S=torch.empty(0, dtype=torch.int64))
    targets = CpuKernel("fp32").row_math().find_targets(feat_GD, label_G, SHARD, 1, empty, torch.float32)
    assert targets.elsewhere_G.all()
    assert (targets.position_G == -1).all()
