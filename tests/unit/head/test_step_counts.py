"""The planner's bytes of an update, beside what torch is handed in real ones."""

import pytest
import torch

from partial_fc.head import Storage
from partial_fc.head.rows import RowTable
from partial_fc.verbs.plan import counts as plan
from tests.unit.operations import Operations

D, ROWS = 256, 1024
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP32)], ids=str)
@pytest.mark.parametrize("optimizer", plan.OPTIMIZERS)
def test_an_update_moves_the_bytes_that_are_planned(optimizer, dtypes):
    table = RowTable(0, ROWS, D, 0, plan.OPTIMIZERS[optimizer](), Storage(*dtypes), "cpu")
    table.all_rows()
    row, size = torch.arange(0, ROWS, 2), ROWS // 2
    table.fetch(row, 0)
    gradient = torch.randn(size, D)
    with Operations() as operations:
        table.update(row, 0, size, gradient, 0.1, 0)
    planned = plan.update_bytes(optimizer, table.storage)
    assert operations.num_bytes / (size * D) == pytest.approx(planned, rel=0.02)
