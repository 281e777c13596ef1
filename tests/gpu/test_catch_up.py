"""The Triton kernel's catch-up beside all steps in float64; where and how: test_triton.py."""

import pytest
import torch

pytest.importorskip("triton")

from partial_fc.head.kernels.triton_catch_up import catch_up
from partial_fc.head.rows import catch_up as on_cpu
from partial_fc.head.rows.storage import round_stochastically
from tests.gpu.test_triton import DEVICE, INTERPRETED, pytestmark  # noqa: F401
from tests.unit.head.rows.test_row_optimizers import CLOSED, lagging

FIRST_ROW = (1 << 33) + 1000  # both halves of a row's number count
STEPS = 340


def caught_up(optimizer, tables, row_S=None, number_S=None, keys=None, first=0):
    """The tables, after the kernel has done what it does."""
    rates = [0.01 * (1 + i % 7) for i in range(STEPS)]
    past = on_cpu.make(optimizer, DEVICE, rates[first:-10], first)
    for lr in rates[-10:]:
        past.record(lr)
    wide = [name for name, width in optimizer.state_widths().items() if width == "row"]
    there = {name: t.to(DEVICE, copy=True) for name, t in tables.items()}
    form = {**past.closed_form(), "first_step": past.first, "touched_step": past.num_steps}
    catch_up(
        form, there, wide, *(None if t is None else t.to(DEVICE) for t in (row_S, number_S)), FIRST_ROW, keys or {}
    )
    return {name: t.cpu() for name, t in there.items()}, on_cpu.CatchUp(optimizer, rates, 0)


@pytest.mark.parametrize("first", [0, 20])
@pytest.mark.parametrize("optimizer", CLOSED, ids=str)
def test_rows_of_every_step(optimizer, first):
    """Rows that rested, that never took part, of the first steps and of later ones; some are not asked for."""
    since_K, centre_KD, state = lagging(optimizer, STEPS, torch.Generator().manual_seed(3))
    since_K, asked_K = since_K.clamp(min=first), torch.arange(0, 300, 5)
    before = centre_KD.double()
    after, exact = before.clone(), {name: t.double() for name, t in state.items()}
    tables = {"centres": centre_KD, **state, "touched": since_K.int()[:, None]}
    moved, steps = caught_up(optimizer, tables, asked_K, first=first)
    steps.apply(after, exact, since_K)
    assert (moved["touched"][asked_K] == STEPS).all()
    error = (moved["centres"].double() - after).abs()
    assert (error <= 4e-6 * ((after - before).abs() + before.abs()))[asked_K].all()
    for name in state:
        torch.testing.assert_close(moved[name][asked_K].double(), exact[name][asked_K], rtol=3e-5, atol=1e-30)
    others_K = torch.ones(300, dtype=torch.bool).index_fill(0, asked_K, False)
    for name, t in tables.items():
        assert torch.equal(moved[name][others_K], t[others_K]), name


@pytest.mark.parametrize("optimizer", [CLOSED[1], CLOSED[2]], ids=str)
def test_rows_that_are_up_to_date_and_how_bfloat16_is_rounded(optimizer):
    """By the numbers of the rows, which are not their places."""
    since_K, centre_KD, state = lagging(optimizer, STEPS, torch.Generator().manual_seed(4))
    since_K[5::9] = STEPS
    narrow = {name: t.bfloat16() if name != "num_steps" else t for name, t in {"centres": centre_KD, **state}.items()}
    touched = {"touched": since_K.int()[:, None]}
    keys, number_S = {name: 77 + i for i, name in enumerate(narrow)}, torch.arange(300) * 11
    wide, _ = caught_up(optimizer, {name: t.float() for name, t in narrow.items()} | touched)
    got, _ = caught_up(optimizer, narrow | touched, None, number_S, keys)
    late_K = since_K < STEPS
    for name, before in narrow.items():
        assert torch.equal(got[name][~late_K], before[~late_K]), name
        if before.dtype == torch.bfloat16:
            bits = round_stochastically(wide[name], number_S + FIRST_ROW, keys[name])
            same = (got[name] == bits)[late_K].float().mean()
            assert same == 1 if INTERPRETED else same > 0.999
