"""Autograd's node of the loss, and the centres' gradient between backward and `step`: deferred, in O(G * D) numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from partial_fc.comm import Work
from partial_fc.head.kernels import Kernel, LogitGrad, Logits

if TYPE_CHECKING:
    from partial_fc.head.rows import RowTable


@dataclass
class DeferredGradient:
    """The centres' gradient of one backward before it is computed: the forward's logits and the gradient by them."""

    logits: Logits
    logit_grad: LogitGrad
    rows: Tensor | None  # the active local rows (Logits.row_S is about the table that was fetched); None: all

    def scale(self, factor: float | Tensor) -> None:
        grad = self.logit_grad
        self.logit_grad = replace(grad, factor_G=grad.factor_G * factor, target_grad_G=grad.target_grad_G * factor)


class Pending(list[DeferredGradient]):
    """The deferred gradients since the last step, one for each backward."""

    def __init__(self) -> None:
        super().__init__()
        self.on_backward: Callable[[Tensor], None] | None = None  # is told the gradient of the loss

    def add(self, deferred: DeferredGradient, grad_loss: Tensor) -> None:
        """Adds the deferred gradient of a backward; grad_loss: d(what was differentiated)/d(loss), scalar."""
        deferred.scale(grad_loss)
        self.append(deferred)
        if self.on_backward is not None:
            self.on_backward(grad_loss)

    def finite(self) -> Tensor:
        """Returns whether all that the gradient is computed from, but for the centres, is finite: bool scalar."""
        grads = ((part.logits.unit_GD, part.logit_grad.factor_G, part.logit_grad.target_grad_G) for part in self)
        good = [torch.isfinite(x).all() for grad in grads for x in grad]
        return torch.stack(good).all() if good else torch.ones((), dtype=torch.bool)

    def gradients(self, kernel: Kernel) -> Iterator[tuple[Tensor | None, int, int, Tensor]]:
        """Yields (rows, begin, end, gradient of rows[begin:end]); several backwards before a step are added up."""
        self[:] = concatenate(self)
        if len(self) == 1:
            for begin, end, grad_KD in kernel.centre_gradients(self[0].logits, self[0].logit_grad):
                yield self[0].rows, begin, end, grad_KD
        elif self:
            rows, total = sum_gradients(self, kernel)
            yield rows, 0, len(total), total

    def square_sum(self, kernel: Kernel, device: torch.device) -> Tensor:
        """Returns the sum of squares of the gradient, float64 scalar, by a pass over the centres."""
        here = torch.zeros((), dtype=torch.float64, device=device)
        for _, _, _, grad_KD in self.gradients(kernel):
            here += grad_KD.double().square_().sum()
        return here

    def update(self, kernel: Kernel, store: "RowTable", lr: float, step: int) -> None:
        """Updates the rows that took part."""
        self[:] = concatenate(self)
        if len(self) == 1 and kernel.update(self[0].logits, self[0].logit_grad, store, lr, step):
            return
        updated = False
        for row_S, begin, end, grad_KD in self.gradients(kernel):
            store.update(None if row_S is None else row_S[begin:end], begin, end, grad_KD, lr, step)
            updated = True
        if not updated:  # no backward, or no active row on this rank: catching up counts every step
            store.update(None, 0, 0, store.centre_LD[:0], lr, step)

    def non_finite_rows(self) -> Iterator[Tensor]:
        """Yields the local rows whose centre has NaN or Inf, of those that took part, some at a time."""
        for part in self:
            table, row_S = part.logits.centre_LD, part.logits.row_S
            for place_K in torch.arange(part.logits.num_sampled, device=table.device).split(1 << 14):
                centre_KD = table[place_K if row_S is None else row_S[place_K]]
                bad_K = place_K[~centre_KD.isfinite().all(dim=1)]
                yield bad_K if part.rows is None else part.rows[bad_K]


@dataclass
class Backward:
    """Finishes one backward pass: waits for the features' gradient and adds the deferred centres' gradient to
    `pending`."""

    pending: Pending  # gets `deferred`
    deferred: DeferredGradient
    features: Work  # this rank's d(loss)/d(features), on its way
    factor: int  # W where the ranks' gradients will be averaged, 1 where they will be summed
    grad_feat_BD: Tensor | None = None  # the same, arrived: backward may be called twice

    def __call__(self, grad_loss: Tensor) -> Tensor:
        self.pending.add(replace(self.deferred), grad_loss)
        if self.grad_feat_BD is None:
            self.grad_feat_BD = self.features.wait()
        return self.grad_feat_BD * (grad_loss if self.factor == 1 else grad_loss * self.factor)


class Loss(torch.autograd.Function):
    """The autograd function of the loss. Its forward returns the loss that the head has computed; its backward calls
    `Backward`."""

    @staticmethod
    def forward(ctx, feat_BD: Tensor, loss: Tensor, backward: Backward) -> Tensor:
        ctx.dtype, ctx.finish = feat_BD.dtype, backward
        ctx.mark_dirty(loss)  # so the very tensor may be returned
        ctx.save_for_backward(torch.empty(0))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: Tensor):
        assert ctx.saved_tensors  # torch's error in a second backward without retain_graph, which would add up unseen
        return ctx.finish(grad_loss).to(ctx.dtype), None, None


def concatenate(parts: list[DeferredGradient]) -> list[DeferredGradient]:
    """Joins several backwards over the same rows into one over all their features. Where rows or rules differ
    (CurricularFace's moves with every forward), the parts stay as they are."""
    if len(parts) < 2 or not all(_same_rule(part.logits, parts[0].logits) for part in parts):
        return parts
    logits, grads = [part.logits for part in parts], [part.logit_grad for part in parts]
    joined_logits = replace(
        logits[0],
        unit_GD=torch.cat([part.unit_GD for part in logits]),
        target_G=torch.cat([part.target_G for part in logits]),
    )
    joined_grad = LogitGrad(
        torch.cat([grad.factor_G for grad in grads]), torch.cat([grad.target_grad_G for grad in grads])
    )
    return [DeferredGradient(joined_logits, joined_grad, parts[0].rows)]


def _same_rule(a: Logits, b: Logits) -> bool:
    """Whether the logits differ in nothing but features and targets."""
    if not (a.negatives.is_cosine and b.negatives.is_cosine):  # one number for each feature
        return False
    same_rows = a.row_S is b.row_S and a.centre_LD is b.centre_LD
    same_rows &= a.target_G.shape[1:] == b.target_G.shape[1:]
    return same_rows and (a.scale, a.negatives, a.sub_centres) == (b.scale, b.negatives, b.sub_centres)


def sum_gradients(parts: Sequence[DeferredGradient], kernel: Kernel) -> tuple[Tensor | None, Tensor]:
    """Returns (rows, gradient) summed over several backwards with overlapping rows; stores the whole gradient."""
    unit_GD = parts[0].logits.unit_GD
    rows = None
    if parts[0].rows is not None:
        rows = torch.unique(torch.cat([part.rows for part in parts if part.rows is not None]))
    total = unit_GD.new_zeros(parts[0].logits.num_sampled if rows is None else len(rows), unit_GD.shape[1])
    for part in parts:
        for begin, end, grad_KD in kernel.centre_gradients(part.logits, part.logit_grad):
            if rows is None or part.rows is None:
                total[begin:end] += grad_KD
            else:
                total.index_add_(0, torch.searchsorted(rows, part.rows[begin:end]), grad_KD)
    return rows, total
