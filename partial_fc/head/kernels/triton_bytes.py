"""Counts the bytes that the Triton kernel's row update moves, for the planner. Does not import Triton."""

from dataclasses import dataclass

import torch

from partial_fc.head.rows import RowOptimizer, Storage


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes read and written, from the sums over features of the gradient's product to rows as they are stored."""

    element: int  # of each active row: its centre and its state as wide as that, each read once and written once
    gradient: int  # of each element besides, written by the product and read here: a chunk of it stays in the L2 cache
    row: int  # of each row besides: scalar state, `touched`, where its targets are; not its number (8 where sampled)


def update_bytes(optimizer: RowOptimizer, storage: Storage) -> UpdateBytes:
    """storage: float32, bfloat16 or float16, on the device. Tests count the kernel's loads and stores."""
    widths = list(optimizer.state_widths().values())
    state_dtype = storage.state_dtype or storage.dtype
    wide = storage.dtype.itemsize + widths.count("row") * state_dtype.itemsize
    scalars = widths.count("scalar") * torch.float32.itemsize
    gradient = 2 * torch.float32.itemsize
    return UpdateBytes(2 * wide, gradient, 2 * scalars + torch.int32.itemsize + 2 * torch.int32.itemsize)
