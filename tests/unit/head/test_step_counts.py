"""The planner's tables of operations and bytes, beside what torch is handed in real steps."""

import pytest
import torch

from partial_fc.head import CosFace, RowSGD, Storage
from partial_fc.head.rows import RowTable
from partial_fc.verbs.plan import counts as plan
from partial_fc.verbs.plan.options import PlanOptions
from tests.flat import flat_head
from tests.unit.operations import Operations

D, ROWS = 256, 1024
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {FP32: "fp32", BF16: "bf16"}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP32)], ids=str)
@pytest.mark.parametrize("optimizer", plan.OPTIMIZERS)
def test_an_update_moves_the_bytes_that_are_planned(optimizer, dtypes, sampled):
    table = RowTable(0, ROWS, D, 0, plan.OPTIMIZERS[optimizer](), Storage(*dtypes), "cpu")
    table.all_rows()
    row = torch.arange(0, ROWS, 2) if sampled else None
    size = ROWS // 2 if sampled else 512  # one chunk
    table.fetch(row, 0)
    gradient = torch.randn(size, D)
    with Operations() as operations:
        table.update(row, 0, size, gradient, 0.1, 0)
    planned = plan.update_bytes(optimizer, table.storage, sampled)
    assert operations.num_bytes / (size * D) == pytest.approx(planned, rel=0.02)
    if not sampled and FP16 not in dtypes:
        assert operations.count == plan.update_operations(optimizer, table.storage)


@pytest.mark.parametrize("rate", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_plain_step_moves_and_launches_what_is_planned(dtype, rate):
    """Bytes that do not depend on the batch are those of rows: what is left of two batches at none."""
    found = {}
    num_classes = 6 * ROWS
    for batch in (16, 16, 48):  # the first one fills what the process keeps of a drawing
        head = flat_head(num_classes, D, CosFace(), rate, impl="plain", storage=Storage(dtype), optimizer=RowSGD())
        head.store.all_rows()
        feat, label = torch.randn(batch, D, requires_grad=True), torch.arange(batch)
        with Operations() as operations:
            head(feat, label).backward()
            head.step(0.1)
        found[batch] = operations.num_bytes, operations.count
    options = PlanOptions(
        num_classes, D, batch=16, sample_rate=rate, dtype=NAMES[dtype], state_dtype=NAMES[dtype], precision="fp32",
        device="cpu", impl="plain",
    )  # fmt: skip
    of_rows = (3 * found[16][0] - found[48][0]) / 2
    assert of_rows == pytest.approx(plan.traffic_bytes(options), rel=0.02)
    assert found[16][1] == pytest.approx(plan.operations(options), rel=0.12)
