"""Counts what a step of the head moves and launches: the planner's numbers of operations and bytes.

tests/unit/head/test_step_counts.py compares the tables with what torch is handed in real steps. kernels/triton_bytes.py
has what the kernels that move rows themselves read and write.

Bytes are those read plus those written; in place a number counts twice.
"""

from typing import Any

import torch

from partial_fc.head.rows import RowAdagrad, RowAdam, RowAdamW, RowSGD, Storage

OPTIMIZERS: dict[str, type] = {"sgd": RowSGD, "adamw": RowAdamW, "adagrad": RowAdagrad, "adam": RowAdam}

# ---- operations of a step; by whether classes are sampled, where that matters

# Beside the kernel: gathering, checks, choosing of rows, targets, loss, the way back. (On a GPU kernels do most of it.
# On a CPU, where waiting for a number costs nothing, a step is drawn by itself, with many small operations.)
HOST_OPERATIONS = {"cuda": {False: 15, True: 17}, "cpu": {False: 57, True: 245}}
# Of a kernel, its update of the rows included: whatever the classes, and for each chunk of them.
KERNEL_OPERATIONS = {"cpu": (30, 0), "triton": (8, 5), "plain": (0, 71)}
# Of `RowTable.update`, for each chunk, and for each table in bfloat16 besides.
_UPDATE_OPERATIONS = {"sgd": 7, "adamw": 21, "adagrad": 12, "adam": 22}
_ROUNDING_OPERATIONS = 53

# ---- bytes, of one number of a row

# In the mathematics of each optimizer, whose operations are torch's own (rows/optimizers.py).
_STEP = {"sgd": 44, "adamw": 92, "adagrad": 36, "adam": 44}
# From how a table is stored to float32, and back: of rows that stand together, and of chosen ones.
_LOAD: dict[Any, dict[bool, int]] = {
    torch.float32: {False: 0, True: 8},
    torch.bfloat16: {False: 6, True: 10},
    torch.float16: {False: 6, True: 10},
}
_STORE: dict[Any, dict[bool, int]] = {
    torch.float32: {False: 0, True: 8},
    torch.bfloat16: {False: 120, True: 120},  # 116 of them for the noise, and the rounding with it
    torch.float16: {False: 6, True: 10},
}
# In both passes of the plain kernel, once the centres are float32.
_PLAIN_PASSES = 76


def update_operations(optimizer: str, storage: Storage) -> int:
    """Operations of one chunk in `RowTable.update`, where no kernel moves the rows itself."""
    return _UPDATE_OPERATIONS[optimizer] + _ROUNDING_OPERATIONS * _tables(optimizer, storage).count(torch.bfloat16)


def update_bytes(optimizer: str, storage: Storage, sampled: bool) -> int:
    """Bytes of one number of an active row in `RowTable.update`."""
    tables = _tables(optimizer, storage)
    return _STEP[optimizer] + sum(_LOAD[dtype][sampled] + _STORE[dtype][sampled] for dtype in tables)


def plain_pass_bytes(storage: Storage, sampled: bool) -> int:
    """Bytes of one number of an active centre in the plain kernel's two passes."""
    return _PLAIN_PASSES + 2 * _LOAD[storage.dtype][sampled]


def _tables(optimizer: str, storage: Storage) -> list[torch.dtype]:
    """The dtypes of the tables as wide as a feature."""
    wide = list(OPTIMIZERS[optimizer]().state_widths().values()).count("row")
    return [storage.dtype, *[storage.state_dtype or storage.dtype] * wide]
