"""The reference kernel in PyTorch's operations, chunk by chunk over the classes, for any device and dtype.

`sums` keeps a few numbers a row and forms the features' gradient on its way; `centre_gradients` forms each chunk's
logits again.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from partial_fc.head.kernels import Kernel, LogitGrad, Logits, Sums, by_label
from partial_fc.head.kernels.nearest import Nearest
from partial_fc.head.kernels.unit import CHUNK_ROWS, unit, unit_backward
from partial_fc.head.softmax import RowMath

# Of one chunk, whichever is reached first: 4 MiB of float32 logits, and as much of centres at D = 512, stay in a
# core's cache.
CHUNK_LOGITS = 1 << 20
# The same where nothing but the nearest classes is looked for: 64 MiB of float32.
NEAREST_LOGITS = 1 << 24


class PlainKernel(Kernel):
    """The kernel in PyTorch's operations, in the features' dtype throughout."""

    name = "plain"
    precision = "fp32"

    def row_math(self) -> RowMath:
        return RowMath()

    def sums(self, logits: Logits, with_weighted_sum: bool = True, num_nearest: int = 0) -> Sums:
        """Keeps denominators relative to a running maximum, so that no scale under- or overflows."""
        unit_GD = logits.unit_GD
        most_G = unit_GD.new_full((len(unit_GD),), -torch.inf)
        sum_G = torch.zeros_like(most_G)
        weighted_sum_GD = torch.zeros_like(unit_GD) if with_weighted_sum else None
        nearest = Nearest(len(unit_GD), num_nearest, unit_GD.dtype, unit_GD.device) if num_nearest else None
        for begin, end, hat_KD, _ in _chunks(logits):
            cos_GK = unit_GD @ hat_KD.T
            if nearest is not None:
                _add(nearest, cos_GK, begin, logits.sub_centres)
            logit_GK, slope_GK = _logits(logits, begin, end, cos_GK)
            larger_G = torch.maximum(most_G, logit_GK.amax(dim=1))
            shift_G = larger_G.masked_fill(larger_G == -torch.inf, 0.0)
            shrink_G = (most_G - shift_G).exp_()
            exp_GK = logit_GK.sub_(shift_G[:, None]).exp_()
            sum_G = sum_G * shrink_G + exp_GK.sum(dim=1)
            if weighted_sum_GD is not None:
                weight_GK = exp_GK if slope_GK is None else exp_GK.mul_(slope_GK)
                weighted_sum_GD.mul_(shrink_G[:, None]).addmm_(weight_GK, hat_KD)
            most_G = larger_G
        if weighted_sum_GD is not None:
            weighted_sum_GD.div_(sum_G.masked_fill(sum_G == 0, 1.0)[:, None])
        return Sums(sum_G.double() * most_G.double().exp(), weighted_sum_GD, nearest=nearest)

    def nearest(self, logits: Logits, k: int) -> Nearest:
        """By torch.mm and torch.topk; centres may lie on another device than features."""
        found = Nearest(len(logits.unit_GD), k, logits.unit_GD.dtype, logits.unit_GD.device)
        most = max(64, NEAREST_LOGITS // max(1, len(logits.unit_GD)))
        for begin, _, hat_KD, _ in _chunks(logits, most):
            _add(found, logits.unit_GD @ hat_KD.T, begin, logits.sub_centres)
        return found

    def centre_gradients(self, logits: Logits, logit_grad: LogitGrad) -> Iterator[tuple[int, int, Tensor]]:
        unit_GD = logits.unit_GD
        sign_G = logit_grad.factor_G.sign().to(unit_GD.dtype)
        log_factor_G = logit_grad.factor_G.abs().log().to(unit_GD.dtype)
        for begin, end, hat_KD, norm_K1 in _chunks(logits):
            logit_GK, slope_GK = _logits(logits, begin, end, unit_GD @ hat_KD.T)
            grad_GK = logit_GK.add_(log_factor_G[:, None]).exp_().mul_(sign_G[:, None])
            if slope_GK is not None:
                grad_GK.mul_(slope_GK)
            inside, place = _targets(logits.target_GT, begin, end)
            grad_GK[inside[0], place - begin] = by_label(logit_grad.target_grad_G)[inside]
            grad_KD = grad_GK.T @ unit_GD
            yield begin, end, unit_backward(grad_KD, hat_KD, norm_K1)


def _add(found: Nearest, cos_GK: Tensor, begin: int, sub_centres: int) -> None:
    """Adds the classes of a chunk, whose rows begin at `begin`; each is as near as the nearest of its centres."""
    if sub_centres > 1:
        cos_GK = cos_GK.unflatten(1, (-1, sub_centres)).amax(2)
    first = begin // sub_centres
    found.add(cos_GK, torch.arange(first, first + cos_GK.shape[1], device=cos_GK.device))


def _chunks(logits: Logits, step: int | None = None) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """(begin, end, unit centres, their lengths) of chunks of whole classes. step: their rows, at most."""
    if step is None:
        step = max(64, min(CHUNK_ROWS, CHUNK_LOGITS // max(1, len(logits.unit_GD))))
    step = max(logits.sub_centres, step - step % logits.sub_centres)
    for begin in range(0, logits.num_sampled, step):
        end = min(begin + step, logits.num_sampled)
        rows = slice(begin, end) if logits.row_S is None else logits.row_S[begin:end]
        yield begin, end, *unit(logits.centre_LD[rows].to(logits.unit_GD))


def _targets(target_GT: Tensor, begin: int, end: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((rows, labels), places) of the targets in [begin, end)."""
    row, label = ((target_GT >= begin) & (target_GT < end)).nonzero(as_tuple=True)
    return (row, label), target_GT[row, label]


def _logits(logits: Logits, begin: int, end: int, cos_GK: Tensor) -> tuple[Tensor, Tensor | None]:
    """The chunk's logits, -inf where left out, and the slopes f'(cos), None where they are 1."""
    k = logits.sub_centres
    left_out_GK = torch.zeros_like(cos_GK, dtype=torch.bool)
    if k > 1:
        nearest = cos_GK.unflatten(1, (-1, k)).argmax(dim=2, keepdim=True)
        left_out_GK = torch.ones_like(left_out_GK)
        left_out_GK.unflatten(1, (-1, k)).scatter_(2, nearest, False)
    (row, _), place = _targets(logits.target_GT, begin, end)
    for i in range(k):
        left_out_GK[row, place - place % k - begin + i] = True
    value_GK, slope_GK = logits.negatives(cos_GK)
    logit_GK = value_GK * logits.scale
    return logit_GK.masked_fill_(left_out_GK, -torch.inf), slope_GK
