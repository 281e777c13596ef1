"""The Triton kernel's row update against RowTable.update; where and how: test_triton.py."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from partial_fc.head.kernels.triton import TritonKernel
from partial_fc.head.kernels.triton_bytes import update_bytes
from partial_fc.head.rows import RowAdagrad, RowAdamW, RowSGD, RowTable, Storage
from partial_fc.head.rows.storage import round_stochastically
from tests.gpu.test_triton import DEVICE, INTERPRETED, Case, Logits, problem, pytestmark  # noqa: F401

# Factors that are powers of 2: their products are exact, so it does not matter what is rounded before a sum.
EXACT = [RowSGD(0.5, 2.0**-11), RowSGD(0.5, 2.0**-11, nesterov=True), RowSGD(0.0, 0.0)]
OTHERS = [RowAdamW(weight_decay=0.1), RowAdagrad(weight_decay=0.01)]
STORED = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]
LR = 2.0**-6
FIRST_ROW = (1 << 33) + 1000  # both halves of a row's number count


def table(optimizer, storage: Storage, case: Case, catch_up="none") -> RowTable:
    num_rows = 2 * case.sampled if case.rows else case.sampled
    return RowTable(FIRST_ROW, num_rows, case.width, 3, optimizer, storage, DEVICE, catch_up)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Every bit. Compiled, variants of the kernel add up a row in different orders: of float32 all but the last bits,
    of 16 bits most numbers, the others rounded to their other neighbour."""
    if INTERPRETED:
        return torch.equal(a, b)
    if a.dtype == torch.float32:
        return torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    return bool((a == b).float().mean() > 0.9) and torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-5)


def steps(store: RowTable, case: Case, fused: bool, how_many: int = 3) -> dict[str, torch.Tensor]:
    """The rows after some steps, in which other rows take part each time."""
    kernel = TritonKernel("fp32")
    logits, logit_grad = problem(case)
    for step in range(how_many):
        row_S = None if logits.row_S is None else (logits.row_S[step:] if step else logits.row_S)
        target_G = logits.target_G.clamp(max=-1 if row_S is None else len(row_S) - 1) if step else logits.target_G
        centre_LD, row_S = store.fetch(row_S, step)
        here = replace(logits, centre_LD=centre_LD, row_S=row_S, target_G=target_G)
        if fused:
            assert kernel.update(here, logit_grad, store, LR, step)
            continue
        for begin, end, grad_KD in kernel.centre_gradients(here, logit_grad):
            row_K = None if row_S is None else row_S[begin:end]
            store.update(row_K, begin, end, grad_KD, LR, step)
    return {name: rows.clone() for name, rows in store.row_state().items()}


@pytest.mark.parametrize(
    ("optimizer", "dtypes", "rows", "catch_up"),
    [
        (EXACT[0], STORED[1], True, "none"),
        (EXACT[0], STORED[0], False, "exact"),
        (EXACT[1], STORED[2], True, "none"),
        (EXACT[1], STORED[1], True, "exact"),
        (EXACT[2], STORED[3], False, "none"),
    ],
    ids=str,
)
def test_fused_steps_of_sgd_have_the_bits_of_the_table(optimizer, dtypes, rows, catch_up):
    case = Case(features=7, sampled=53, width=40, scale=8.0, rows=rows, target_here=rows)
    fused, apart = (steps(table(optimizer, Storage(*dtypes), case, catch_up), case, way) for way in (True, False))
    for name in fused:
        assert same(fused[name], apart[name]), name
    assert fused["touched"].max() == 3


@pytest.mark.parametrize("optimizer", [EXACT[1], *OTHERS], ids=str)
def test_every_optimizer_and_its_rounding(optimizer):
    """In float32 the table's step but for its last bits, and in bfloat16 the very bits of that, rounded."""
    case = Case(features=7, sampled=53, width=96, scale=8.0, rows=True)
    wide, apart, narrow = (table(optimizer, Storage(t), case) for t in (torch.float32, torch.float32, torch.bfloat16))
    for store in (wide, apart):
        store.all_rows().copy_(narrow.all_rows())
    keys = table(optimizer, Storage(), case).begin_fused_update(1, LR, 0)
    stepped, expected, rounded = steps(wide, case, True, 1), steps(apart, case, False, 1), steps(narrow, case, True, 1)
    row_M = (stepped["touched"].squeeze(1) > 0).nonzero().squeeze(1)
    assert len(row_M) == case.sampled
    for name, key in keys.items():
        torch.testing.assert_close(stepped[name], expected[name], rtol=1e-5, atol=1e-7)
        if rounded[name].dtype == torch.bfloat16:
            bits = round_stochastically(stepped[name][row_M], row_M + FIRST_ROW, key)
            assert same(rounded[name][row_M], bits), name
        else:
            assert same(rounded[name], stepped[name]), name


def test_steps_after_the_first_are_those_of_the_table():
    """AdamW's correction of bias counts each row's steps."""
    case = Case(features=7, sampled=53, width=40, scale=8.0, rows=True)
    fused, apart = (steps(table(OTHERS[0], Storage(), case), case, way) for way in (True, False))
    assert fused["num_steps"].unique().tolist() == [0, 1, 2, 3]
    for name in fused:
        torch.testing.assert_close(fused[name], apart[name], rtol=2e-5, atol=1e-6)


@pytest.mark.skipif(not INTERPRETED, reason="counts what the interpreter loads and stores")
@pytest.mark.parametrize(("optimizer", "dtypes"), [(OTHERS[0], STORED[3]), (OTHERS[1], STORED[1])], ids=str)
def test_the_bytes_that_it_moves_are_those_that_are_counted(optimizer, dtypes, monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    from partial_fc.head.kernels import triton_update

    moved = [0]

    def counting(memory):
        def access(builder, ptrs, *rest):
            mask = next(x for x in rest if x is not None and x.data.dtype == bool)
            moved[0] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
            return memory(builder, ptrs, *rest)

        return access

    finish = triton_update.Finish.__call__

    def counted(*args):
        with monkeypatch.context() as patch:
            for name in ("create_masked_load", "create_masked_store"):
                patch.setattr(InterpreterBuilder, name, counting(getattr(InterpreterBuilder, name)))
            finish(*args)

    monkeypatch.setattr(triton_update.Finish, "__call__", counted)
    case, storage = Case(features=3, sampled=70, width=24, target_here=False), Storage(*dtypes)
    steps(table(optimizer, storage, case), case, True, 1)
    count = update_bytes(optimizer, storage)
    assert moved[0] == 70 * (24 * (count.element + count.gradient // 2) + count.row)


def test_what_it_cannot_move_it_leaves():
    case = Case(features=3, sampled=4)
    logits, logit_grad = problem(case)
    store = table(EXACT[0], Storage(), case)
    before = store.fetch(None, 0)[0].clone()
    assert not TritonKernel("fp32").update(logits, logit_grad, store, 0.25, 0)  # its centres are not the table's
    assert torch.equal(store.centre_LD, before)
