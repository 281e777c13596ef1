"""The local part of the softmax, chunk by chunk over the classes: pure functions of this rank's tensors.

The logits of all classes never exist at once: the forward keeps one number a row, the backward forms each chunk's
logits again. A chunk spans classes, not rows: with millions of classes a row's logits alone would fill the memory,
and a chunk of few rows would make thin matrix products.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Logits alive at a time, in elements: 4 MiB as float32 stay in a core's cache together with the chunk's centres.
CHUNK_LOGITS = 1 << 20


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, D) -> (rows of length 1, their former lengths (N, 1)). A row of length 0 stays 0."""
    norm = x.norm(dim=1, keepdim=True)
    return x / torch.where(norm > 0, norm, 1.0), norm


def unit_backward(grad_unit: Tensor, unit_rows: Tensor, norm: Tensor) -> Tensor:
    """The gradient of `unit`'s input: the part of grad_unit across the row, over its length; 0 for a row of length 0.
    Overwrites grad_unit."""
    along = (grad_unit * unit_rows).sum(dim=1, keepdim=True)
    grad_unit.addcmul_(unit_rows, along, value=-1.0)
    return grad_unit.div_(torch.where(norm > 0, norm, torch.inf))


def own_cosine(unit_GD: Tensor, centre_LD: Tensor, own: Tensor, row: Tensor) -> Tensor:
    """Cosines between the features with a centre here and that centre. own: their places in the global batch;
    row: the centres' rows; both (number of such features,)."""
    return (unit_GD[own] * unit(centre_LD[row])[0]).sum(dim=1)


def log_sum_exp(
    unit_GD: Tensor,
    centre_LD: Tensor,
    row_S: Tensor | None,
    column_G: Tensor,
    target_G: Tensor,
    scale: float,
) -> Tensor:
    """log(sum of exp(logit)) over this rank's sampled classes: (G,), -inf where there are none.

    row_S: the sampled rows of centre_LD, ascending (None: all). column_G: each row's own class as a place in row_S,
    -1 where another rank owns it. target_G: the logit of the own class, margin and scale applied.
    """
    total_G = unit_GD.new_full((len(unit_GD),), -torch.inf)
    for begin, end, hat_KD, _ in _chunks(len(unit_GD), centre_LD, row_S):
        logit_GK = (unit_GD @ hat_KD.T).mul_(scale)
        inside, column = _inside(column_G, begin, end)
        logit_GK[inside, column] = target_G[inside]
        total_G = torch.logaddexp(total_G, logit_GK.logsumexp(dim=1))
    return total_G


def gradients(
    unit_GD: Tensor,
    centre_LD: Tensor,
    row_S: Tensor | None,
    column_G: Tensor,
    target_G: Tensor,
    slope_G: Tensor,
    total_G: Tensor,
    scale: float,
    weight: Tensor,
) -> tuple[Tensor, Tensor]:
    """d(loss) by the unit features, this rank's part, (G, D), and by the sampled centres, (S, D).

    total_G: log of the softmax denominator over all ranks. slope_G: d(target_G)/d(cosine). weight: what each row's
    loss counts for (a scalar tensor).
    """
    num_sampled = len(centre_LD) if row_S is None else len(row_S)
    grad_unit_GD = torch.zeros_like(unit_GD)
    grad_centre_SD = unit_GD.new_empty(num_sampled, unit_GD.shape[1])
    for begin, end, hat_KD, norm_K1 in _chunks(len(unit_GD), centre_LD, row_S):
        grad_GK = (unit_GD @ hat_KD.T).mul_(scale).sub_(total_G[:, None]).exp_().mul_(scale)
        inside, column = _inside(column_G, begin, end)
        # expm1, not exp - 1: near the end of training p is close to 1 and the difference is what is left to learn.
        grad_GK[inside, column] = torch.expm1(target_G[inside] - total_G[inside]) * slope_G[inside]
        grad_GK.mul_(weight)
        grad_unit_GD.addmm_(grad_GK, hat_KD)
        grad_centre_SD[begin:end] = unit_backward(grad_GK.T @ unit_GD, hat_KD, norm_K1)
    return grad_unit_GD, grad_centre_SD


def _chunks(
    num_rows: int, centre_LD: Tensor, row_S: Tensor | None
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(begin, end, unit centres, their lengths) of chunks that make about CHUNK_LOGITS logits."""
    num_sampled = len(centre_LD) if row_S is None else len(row_S)
    step = max(64, CHUNK_LOGITS // max(1, num_rows))
    for begin in range(0, num_sampled, step):
        end = min(begin + step, num_sampled)
        rows = centre_LD[begin:end] if row_S is None else centre_LD[row_S[begin:end]]
        yield begin, end, *unit(rows)


def _inside(column_G: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """(rows whose own class lies in the chunk, its columns there)."""
    inside = ((column_G >= begin) & (column_G < end)).nonzero().squeeze(1)
    return inside, column_G[inside] - begin
