"""`RowMath` in four launches: everything that happens to a row of the global batch between two collectives.

A program has whole rows, so sums over a row stay in registers. What is float64 there is float64 here, O(G) numbers.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from partial_fc.head.kernels import LogitGrad, Sums
from partial_fc.head.kernels.triton_kernels import row_blocks
from partial_fc.head.margin import EDGE, CombinedMargin, Margin, State
from partial_fc.head.selection.active_rows import ActiveRows
from partial_fc.head.shard import Shard
from partial_fc.head.softmax import Outcome, RowMath, Targets

_NUMBERS = 1024  # to a program, where rows are no wider than a few


@triton.jit
def _unit(x):
    """(rows of length 1, their former lengths), as `plain.unit` has it: 0 stays 0, a length beyond fp32 gives NaN."""
    norm = tl.sqrt_rn(tl.sum(x * x, axis=1))
    divisor = tl.where(norm <= 0.0, 1.0, norm)
    divisor = tl.where(norm == float("inf"), float("nan"), divisor)
    return tl.div_rn(x, divisor[:, None] + tl.zeros_like(x)), norm


@triton.jit
def _first_not_below(row_ptr, num_rows, wanted):
    """Where in num_rows ascending numbers the first stands that is not below `wanted`."""
    low = tl.zeros_like(wanted)
    high = low + num_rows
    left = num_rows
    while left > 0:
        middle = (low + high) // 2
        here = low < high
        below = here & (tl.load(row_ptr + middle, mask=here, other=0) < wanted)
        low = tl.where(below, middle + 1, low)
        high = tl.where(here & ~below, middle, high)
        left = left // 2
    return low


@triton.jit(do_not_specialize=["G", "feat_stride", "start", "num_local", "num_active"])
def targets(
    feat_ptr, feat_stride, label_ptr, row_ptr, table_ptr, table_stride, at_ptr,
    unit_ptr, norm_ptr, elsewhere_ptr, cos_ptr, target_ptr, position_ptr,
    G, start, num_local, num_active, SUB_CENTRES: tl.constexpr,
    D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`RowMath.find_targets`. row (num_active,): the active local rows, ascending; at: where in the table they are."""
    g = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    there = g < G
    mask = there[:, None] & (d < D)[None, :]
    out = g[:, None] * D + d[None, :]
    unit, norm = _unit(tl.load(feat_ptr + g[:, None] * feat_stride + d[None, :], mask=mask, other=0.0).to(tl.float32))
    tl.store(unit_ptr + out, unit, mask=mask)
    tl.store(norm_ptr + g, norm, mask=there)

    class_G = tl.load(label_ptr + g, mask=there, other=0) - start
    local = tl.minimum(tl.maximum(class_G, 0), num_local - 1)
    elsewhere = local != class_G
    position = local * SUB_CENTRES
    if row_ptr is not None:
        position = tl.minimum(_first_not_below(row_ptr, num_active, position), num_active - SUB_CENTRES)
    best = tl.full((BLOCK_K,), float("-inf"), tl.float32)
    target = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    chosen = position
    for sub in tl.static_range(SUB_CENTRES):
        row = position + sub
        if at_ptr is not None:
            row = tl.load(at_ptr + row, mask=there, other=0)
        centre = tl.load(table_ptr + row[:, None] * table_stride + d[None, :], mask=mask, other=0.0).to(tl.float32)
        centre, _ = _unit(centre)
        cos = tl.sum(unit * centre, axis=1)
        nearer = (cos > best) | (cos != cos)
        best = tl.where(nearer, cos, best)
        target = tl.where(nearer[:, None], centre, target)
        chosen = tl.where(nearer, position + sub, chosen)
    tl.store(elsewhere_ptr + g, elsewhere.to(tl.int8), mask=there)
    tl.store(cos_ptr + g, best, mask=there)
    tl.store(target_ptr + out, target, mask=mask)
    tl.store(position_ptr + g, tl.where(elsewhere, -1, chosen), mask=there)


@triton.jit(do_not_specialize=["G"])
def margin_of(
    cos_ptr, logit_ptr, slope_ptr, G, scale, cos_m2, sin_m2, m3, edge,
    STRAIGHT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`value_and_slope` of scale * (cos(theta + m2) - m3), by the addition theorem: a GPU has no quick arccos. As in
    margin.angle, theta ends one step of float32 before 0 and pi."""
    g = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = g < G
    cos = tl.load(cos_ptr + g, mask=there, other=0.0)
    logit = cos - m3
    slope = tl.full((BLOCK_K,), 1.0, tl.float32)
    if sin_m2 != 0.0:
        inside = (cos >= -edge) & (cos <= edge)
        bounded = tl.where(cos > edge, edge, tl.where(cos < -edge, -edge, cos))  # NaN stays
        sine = tl.sqrt_rn((1.0 - bounded) * (1.0 + bounded))
        logit = bounded * cos_m2 - sine * sin_m2 - m3
        if not STRAIGHT:
            slope = tl.where(inside, cos_m2 + tl.div_rn(bounded * sin_m2, sine), 0.0)
    tl.store(logit_ptr + g, logit * scale, mask=there)
    tl.store(slope_ptr + g, slope * scale, mask=there)


@triton.jit(do_not_specialize=["G"])
def terms(elsewhere_ptr, logit_ptr, denominator_ptr, terms_ptr, G, BLOCK_K: tl.constexpr):
    """`RowMath.local_terms`."""
    g = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    there = g < G
    elsewhere = tl.load(elsewhere_ptr + g, mask=there, other=1) != 0
    logit = tl.load(logit_ptr + g, mask=there, other=0.0).to(tl.float64)
    total = tl.load(denominator_ptr + g, mask=there, other=0.0) + tl.where(elsewhere, 0.0, tl.exp(logit))
    tl.store(terms_ptr + 2 * g, total, mask=there)
    tl.store(terms_ptr + 2 * g + 1, tl.where(elsewhere, 0.0, logit), mask=there)


@triton.jit
def _expm1(x):
    """exp(x) - 1 for float64 x <= 0 or little above it, right to a few of its last digits (Kahan)."""
    u = tl.exp(x)
    near = (u == 1.0) | (u <= 0.5)
    quotient = (u - 1.0) * (x / tl.log(tl.where(near, 0.5, u)))
    return tl.where(u == 1.0, x, tl.where(near, u - 1.0, quotient))


@triton.jit(do_not_specialize=["G"])
def finish(
    terms_ptr, elsewhere_ptr, slope_ptr, denominator_ptr, sum_ptr, unit_ptr, norm_ptr, target_ptr,
    loss_ptr, factor_ptr, target_grad_ptr, G, scale,
    D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`RowMath.finish`: sum (G, D), the weighted sum, becomes the features' gradient."""
    g = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    there = g < G
    mask = there[:, None] & (d < D)[None, :]
    at = g[:, None] * D + d[None, :]
    denominator = tl.load(terms_ptr + 2 * g, mask=there, other=1.0)
    target_logit = tl.load(terms_ptr + 2 * g + 1, mask=there, other=0.0)
    log_probability = target_logit - tl.log(denominator)
    tl.store(loss_ptr + g, -log_probability, mask=there)

    here = tl.load(denominator_ptr + g, mask=there, other=0.0)
    # Where no class of this rank has a part there is nothing to weigh, however large the factor would be.
    factor = tl.where(here == 0.0, 0.0, scale / (denominator * G))
    tl.store(factor_ptr + g, factor, mask=there)
    elsewhere = tl.load(elsewhere_ptr + g, mask=there, other=1) != 0
    slope = tl.load(slope_ptr + g, mask=there, other=0.0).to(tl.float64)
    target_grad = tl.where(elsewhere, 0.0, _expm1(log_probability) * slope / G).to(tl.float32)
    tl.store(target_grad_ptr + g, target_grad, mask=there)

    weight = (factor * here).to(tl.float32)
    grad = tl.load(sum_ptr + at, mask=mask, other=0.0) * weight[:, None]
    grad += tl.load(target_ptr + at, mask=mask, other=0.0) * target_grad[:, None]
    unit = tl.load(unit_ptr + at, mask=mask, other=0.0)
    grad -= unit * tl.sum(grad * unit, axis=1)[:, None]
    norm = tl.load(norm_ptr + g, mask=there, other=1.0)
    divisor = tl.where(norm <= 0.0, float("inf"), norm)
    tl.store(sum_ptr + at, tl.div_rn(grad, divisor[:, None] + tl.zeros_like(grad)), mask=mask)


class FusedRowMath(RowMath):
    """`RowMath` in Triton, float32. Several labels, a rank without active rows and rarer margins stay with PyTorch's
    operations."""

    def find_targets(
        self, feat_GD: Tensor, label_G: Tensor, shard: Shard, sub_centres: int, active: ActiveRows, dtype: torch.dtype
    ) -> Targets:
        G, D = feat_GD.shape
        table, at_S = active.table, active.row_S
        num_active = len(table) if at_S is None else len(at_S)
        if label_G.dim() > 1 or not num_active or feat_GD.stride(1) != 1 or table.stride(1) != 1:
            return super().find_targets(feat_GD, label_G, shard, sub_centres, active, dtype)
        unit_GD = feat_GD.new_empty(G, D, dtype=dtype)
        found = Targets(
            unit_GD,
            unit_GD.new_empty(G, 1),
            unit_GD.new_empty(G, dtype=torch.bool),
            unit_GD.new_empty(G),
            torch.empty_like(unit_GD),
            torch.empty_like(label_G),
        )
        blocks = row_blocks(D)
        targets[(triton.cdiv(G, blocks["BLOCK_K"]),)](
            feat_GD, feat_GD.stride(0), label_G, active.rows, table, table.stride(0), at_S,
            found.unit_GD, found.norm_G1, found.elsewhere_G.view(torch.int8), found.cos_G, found.centre_GD,
            found.position_G, G, shard.start, len(shard), num_active, SUB_CENTRES=sub_centres, D=D, **blocks,
        )  # fmt: skip
        return found

    def with_margin(self, margin: Margin, targets: Targets, state: State) -> tuple[Tensor, Tensor]:
        if not (isinstance(margin, CombinedMargin) and margin.m1 == 1.0):
            return super().with_margin(margin, targets, state)
        cos_G = targets.cos_G
        logit_G, slope_G = torch.empty_like(cos_G), torch.empty_like(cos_G)
        margin_of[(triton.cdiv(len(cos_G), _NUMBERS),)](
            cos_G, logit_G, slope_G, len(cos_G), float(margin.scale), math.cos(margin.m2), math.sin(margin.m2),
            float(margin.m3), EDGE, STRAIGHT=margin.straight_through, BLOCK_K=_NUMBERS,
        )  # fmt: skip
        return logit_G, slope_G

    def local_terms(self, targets: Targets, target_logit_G: Tensor, sums: Sums) -> Tensor:
        G = len(target_logit_G)
        terms_G2 = sums.denominator_G.new_empty(G, 2)
        terms[(triton.cdiv(G, _NUMBERS),)](
            targets.elsewhere_G.view(torch.int8), target_logit_G, sums.denominator_G, terms_G2, G, BLOCK_K=_NUMBERS
        )
        return terms_G2

    def finish(
        self, terms: Tensor, targets: Targets, target_slope_G: Tensor, sums: Sums, scale: float, training: bool
    ) -> Outcome:
        if not training:
            return super().finish(terms, targets, target_slope_G, sums, scale, training)
        assert sums.weighted_sum_GD is not None
        grad_GD = sums.weighted_sum_GD.contiguous()
        G, D = grad_GD.shape
        loss_G, factor_G = terms.new_empty(G), terms.new_empty(G)
        logit_grad = LogitGrad(factor_G, torch.empty_like(targets.cos_G), sums.cache)
        blocks = row_blocks(D)
        finish[(triton.cdiv(G, blocks["BLOCK_K"]),)](
            terms, targets.elsewhere_G.view(torch.int8), target_slope_G, sums.denominator_G, grad_GD,
            targets.unit_GD, targets.norm_G1, targets.centre_GD, loss_G, factor_G, logit_grad.target_grad_G,
            G, float(scale), D=D, **blocks,
        )  # fmt: skip
        return Outcome(loss_G, logit_grad, grad_GD)
