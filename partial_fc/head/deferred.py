"""What a backward leaves for `step`: everything that the centres' gradient is made of, in O(G*D) numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partial_fc.head.kernels import Kernel, Logits, Slopes


@dataclass
class Pending:
    """The logits of one forward and the slopes that its backward gave them."""

    logits: Logits
    slopes: Slopes
    rows: Tensor | None  # local rows that took part (Logits.row_S is about the table that was fetched); None: all

    def numbers(self) -> list[Tensor]:
        """What the gradient is made of besides the centres."""
        slopes = self.slopes
        return [x for x in (self.logits.unit_GD, slopes.factor_G, slopes.own_G, slopes.all_D) if x is not None]

    def scale(self, factor: float | Tensor) -> None:
        slopes = self.slopes
        self.slopes = replace(
            slopes,
            factor_G=slopes.factor_G * factor,
            own_G=slopes.own_G * factor,
            all_D=None if slopes.all_D is None else slopes.all_D * factor,
        )


def joined(parts: list[Pending]) -> list[Pending]:
    """Several backwards over the same rows are one over all their features: nothing has to be formed twice, or kept."""
    if len(parts) < 2 or any(part.logits.row_S is not parts[0].logits.row_S for part in parts):
        return parts
    if any(part.logits.centre_LD is not parts[0].logits.centre_LD for part in parts):
        return parts
    logits, slopes = [part.logits for part in parts], [part.slopes for part in parts]
    shared_D = [s.all_D for s in slopes if s.all_D is not None]
    whole = replace(
        logits[0],
        unit_GD=torch.cat([part.unit_GD for part in logits]),
        own_G=torch.cat([part.own_G for part in logits]),
    )
    slope = Slopes(
        torch.cat([s.factor_G for s in slopes]),
        torch.cat([s.own_G for s in slopes]),
        torch.stack(shared_D).sum(dim=0) if shared_D else None,
    )
    return [Pending(whole, slope, parts[0].rows)]


def merge(parts: Sequence[Pending], kernel: Kernel) -> tuple[Tensor | None, Tensor]:
    """(rows, gradient) of several backwards that touch overlapping rows; here the gradient does exist at once."""
    width, dtype = parts[0].logits.unit_GD.shape[1], parts[0].logits.unit_GD.dtype
    if parts[0].rows is None:
        rows, total = None, torch.zeros(parts[0].logits.num_sampled, width, dtype=dtype)
    else:
        rows = torch.unique(torch.cat([part.rows for part in parts if part.rows is not None]))
        total = torch.zeros(len(rows), width, dtype=dtype)
    total = total.to(parts[0].logits.unit_GD.device)
    for part in parts:
        for begin, end, grad_KD in kernel.centre_gradients(part.logits, part.slopes):
            if rows is None or part.rows is None:
                total[begin:end] += grad_KD
            else:
                total.index_add_(0, torch.searchsorted(rows, part.rows[begin:end]), grad_KD)
    return rows, total
