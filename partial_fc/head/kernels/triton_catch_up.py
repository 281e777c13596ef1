"""Catch-up on the GPU (rows/catch_up.py): the kernel finds out since when each row lags behind; the host waits for
nothing. Closed forms as in native/catch_up.h; rows of AdamW for which that does not hold go step by step."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from partial_fc.head.kernels import triton_kernels as gpu


@triton.jit(
    do_not_specialize=[
        "S", "sums_stride", "first_row", "first_step", "touched_step", "centre_key", "first_key", "second_key",
    ]
)  # fmt: skip
def catch_up_rows(
    centre_ptr, first_ptr, second_ptr, steps_ptr, touched_ptr, row_ptr, number_ptr, sums_ptr,
    S, sums_stride, first_row, first_step, touched_step, least_step, centre_key, first_key, second_key,
    decay, weight1, beta2, eps,
    OPTIMIZER: tl.constexpr, LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr,
    D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """sums (float64), columns by first missed step: ww, wm, mw, mm of SGD; P, a_0 to a_4 and the rate of AdamW."""
    place = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    d = tl.arange(0, BLOCK_D)
    if row_ptr is None:
        row = place
    else:
        row = tl.load(row_ptr + place, mask=place < S, other=0)
    number = first_row + row
    if number_ptr is not None:
        number = first_row + tl.load(number_ptr + place, mask=place < S, other=0)
    touched = tl.load(touched_ptr + row, mask=place < S, other=touched_step)
    late = touched < touched_step
    since = tl.maximum(touched, first_step)
    mask = late[:, None] & (d < D)[None, :]
    at = row[:, None] * D + d[None, :]
    sums = sums_ptr + (since - first_step)
    centre = tl.load(centre_ptr + at, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(first_ptr + at, mask=mask, other=0.0).to(tl.float32)

    if OPTIMIZER == gpu.SGD:
        ww = tl.load(sums, mask=late, other=0.0).to(tl.float32)[:, None]
        wm = tl.load(sums + sums_stride, mask=late, other=0.0).to(tl.float32)[:, None]
        mw = tl.load(sums + 2 * sums_stride, mask=late, other=0.0).to(tl.float32)[:, None]
        mm = tl.load(sums + 3 * sums_stride, mask=late, other=0.0).to(tl.float32)[:, None]
        moved = centre * ww + first * wm
        first = first * mm + centre * mw
    else:
        second = tl.load(second_ptr + at, mask=mask, other=0.0).to(tl.float32)
        num = tl.load(steps_ptr + row, mask=late, other=0.0)
        closed = late & ((since == 0) | (since >= least_step)) & (num == since.to(tl.float32))

        # ---- step by step, for the first steps, and for rows that have rested
        opened = late & ~closed
        for step in range(tl.min(tl.where(opened, since, touched_step), axis=0), touched_step):
            now = opened & (since <= step)
            now_KD = now[:, None]
            lr = tl.load(sums_ptr + 6 * sums_stride + (step - first_step))
            num = tl.where(now, num + 1.0, num)
            correct1 = tl.where(now, gpu.correction(num, LOG_BETA1), 1.0)
            correct2 = tl.where(now, gpu.correction(num, LOG_BETA2), 1.0)
            first = tl.where(now_KD, first - first * weight1, first)
            second = tl.where(now_KD, second * beta2, second)
            scale = (tl.sqrt_rn(tl.div_rn(second, correct2[:, None])) + eps) * correct1[:, None]
            kept = centre * (1.0 - lr * decay).to(tl.float32) - tl.div_rn(first * lr.to(tl.float32), scale)
            centre = tl.where(now_KD, kept, centre)

        # ---- at once
        missed = tl.where(closed, touched_step - since, 0).to(tl.float64)
        next_step = tl.where(closed, since + 1, 1).to(tl.float64)
        power2 = tl.exp(next_step * tl.full(since.shape, LOG_BETA2, tl.float64))
        near = (eps * tl.sqrt((1.0 - power2) / beta2)).to(tl.float32)[:, None]
        inverse = tl.div_rn(1.0, tl.sqrt_rn(second) + near)
        z = near * inverse
        total = tl.zeros_like(centre)
        for k in tl.static_range(5):
            a = tl.load(sums + (5 - k) * sums_stride, mask=closed, other=0.0).to(tl.float32)
            total = a[:, None] - z * total
        keep = tl.load(sums, mask=closed, other=1.0).to(tl.float32)[:, None]
        moved = centre * keep - total * inverse * first
        fade1 = tl.exp(missed * tl.full(since.shape, LOG_BETA1, tl.float64)).to(tl.float32)
        fade2 = tl.exp(missed * tl.full(since.shape, LOG_BETA2, tl.float64)).to(tl.float32)
        first = first * fade1[:, None]
        gpu.write(second_ptr, at, mask, second * fade2[:, None], number, d, second_key)
        tl.store(steps_ptr + row, num + missed.to(tl.float32), mask=late)
    gpu.write(first_ptr, at, mask, first, number, d, first_key)
    gpu.write(centre_ptr, at, mask, moved, number, d, centre_key)
    tl.store(touched_ptr + row, tl.full((BLOCK_K,), touched_step, tl.int32), mask=late)


def catch_up(
    form: dict[str, Any], tables: dict[str, Tensor], wide: list[str], row_S: Tensor | None, number_S: Tensor | None,
    first_row: int, keys: dict[str, int],
) -> None:  # fmt: skip
    """Does what `CatchUp.in_place` does, for all rows. form: `CatchUp.closed_form`, with first_step and touched_step.
    wide: the tables of the optimizer's state as wide as the centres."""
    centre, beta1, beta2 = tables["centres"], form.get("fade1", 0.0), form.get("fade2", 0.0)
    num_rows, blocks = len(centre) if row_S is None else len(row_S), gpu.row_blocks(centre.shape[1])
    centre_key, first_key, second_key = (gpu.signed(keys.get(name, 0)) for name in ("centres", *wide, *wide)[:3])
    catch_up_rows[(triton.cdiv(num_rows, blocks["BLOCK_K"]),)](
        centre, tables[wide[0]], tables[wide[-1]], tables.get("num_steps"), tables["touched"], row_S, number_S,
        form["sums"], num_rows, form["sums_stride"], first_row, form["first_step"], form["touched_step"],
        form.get("least_step", 0), centre_key, first_key, second_key, form.get("weight_decay", 0.0), 1 - beta1, beta2,
        form.get("eps", 0.0), OPTIMIZER=gpu.SGD.value + form["optimizer"], LOG_BETA1=gpu.log(beta1),
        LOG_BETA2=gpu.log(beta2), D=centre.shape[1], **blocks,
    )  # fmt: skip
