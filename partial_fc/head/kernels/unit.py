"""Rows of length 1, and the gradient through them. (N, D) in any dtype, on any device."""

import torch
from torch import Tensor

CHUNK_ROWS = 2048  # rows multiplied at a time


def unit(x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normalises rows (N, D); returns them and their former lengths (N, 1). A row of length 0 stays 0; one whose length
    is beyond the dtype's range becomes NaN: as zeros it would hide from whoever looks for what is not finite. out:
    where the rows go; x, for example."""
    norm = x.norm(dim=1, keepdim=True)
    return torch.div(x, divisor(norm), out=out), norm


def divisor(norm: Tensor) -> Tensor:
    """Returns by what a row of this length is divided."""
    return torch.threshold(norm, 0.0, 1.0).nan_to_num_(nan=torch.nan, posinf=torch.nan)


def row_dots(x: Tensor, y: Tensor) -> Tensor:
    """Returns the dot products of rows, (..., D) -> (...), CHUNK_ROWS rows at a time."""
    if len(x) <= CHUNK_ROWS:
        return (x * y).sum(dim=-1)
    parts = zip(x.split(CHUNK_ROWS), y.split(CHUNK_ROWS), strict=True)
    return torch.cat([(a * b).sum(dim=-1) for a, b in parts])


def unit_backward(grad_unit: Tensor, unit_rows: Tensor, norm: Tensor) -> Tensor:
    """Returns the gradient of `unit`'s input: the part of grad_unit orthogonal to the row, over its length; 0 for a row
    of length 0. Overwrites grad_unit."""
    along = row_dots(grad_unit, unit_rows)[:, None]
    grad_unit.addcmul_(unit_rows, along, value=-1.0)
    return grad_unit.div_(torch.threshold(norm, 0.0, torch.inf))
