"""The backward pass, which the forward has all but done, and what it leaves for `step`, in O(G * D) numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partial_fc.comm import Work
from partial_fc.head.kernels import Kernel, LogitGrad, Logits


@dataclass
class DeferredGradient:
    """The centres' gradient of one backward, not formed yet: its forward's logits and the gradient by them."""

    logits: Logits
    logit_grad: LogitGrad
    rows: Tensor | None  # the active local rows (Logits.row_S is about the table that was fetched); None: all

    def tensors(self) -> list[Tensor]:
        """What the gradient is made of besides the centres."""
        grad = self.logit_grad
        made_of = (self.logits.unit_GD, grad.factor_G, grad.target_grad_G, grad.uniform_D)
        return [t for t in made_of if t is not None]

    def scale(self, factor: float | Tensor) -> None:
        grad = self.logit_grad
        self.logit_grad = replace(
            grad,
            factor_G=grad.factor_G * factor,
            target_grad_G=grad.target_grad_G * factor,
            uniform_D=None if grad.uniform_D is None else grad.uniform_D * factor,
        )


@dataclass
class Backward:
    """The rest of one backward pass: waits for the features' gradient and hands the centres' to the head."""

    pending: list[DeferredGradient]  # gets `deferred`
    deferred: DeferredGradient
    features: Work  # this rank's d(loss)/d(features), on its way
    factor: int  # W where the ranks' gradients will be averaged, 1 where they will be summed
    grad_feat_BD: Tensor | None = None  # the same, arrived: backward may be called twice

    def __call__(self, grad_loss: Tensor) -> Tensor:
        deferred = replace(self.deferred)
        deferred.scale(grad_loss)
        self.pending.append(deferred)
        if self.grad_feat_BD is None:
            self.grad_feat_BD = self.features.wait()
        return self.grad_feat_BD * (grad_loss if self.factor == 1 else grad_loss * self.factor)


class Loss(torch.autograd.Function):
    """The loss as a node of autograd, whose forward has nothing left to do."""

    @staticmethod
    def forward(ctx, feat_BD: Tensor, loss: Tensor, backward: Backward) -> Tensor:
        ctx.dtype, ctx.finish = feat_BD.dtype, backward
        ctx.mark_dirty(loss)  # so the very tensor may be returned
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        return ctx.finish(grad_loss).to(ctx.dtype), None, None


def concatenate(parts: list[DeferredGradient]) -> list[DeferredGradient]:
    """Makes one of several backwards over the same rows, over all their features: nothing has to be formed twice, or
    kept. Where rows or rules differ (CurricularFace's moves with every forward), the parts stay as they are."""
    if len(parts) < 2 or not all(_same_rule(part.logits, parts[0].logits) for part in parts):
        return parts
    logits, grads = [part.logits for part in parts], [part.logit_grad for part in parts]
    uniform_D = [grad.uniform_D for grad in grads if grad.uniform_D is not None]
    joined_logits = replace(
        logits[0],
        unit_GD=torch.cat([part.unit_GD for part in logits]),
        target_G=torch.cat([part.target_G for part in logits]),
    )
    joined_grad = LogitGrad(
        torch.cat([grad.factor_G for grad in grads]),
        torch.cat([grad.target_grad_G for grad in grads]),
        torch.stack(uniform_D).sum(dim=0) if uniform_D else None,
    )
    return [DeferredGradient(joined_logits, joined_grad, parts[0].rows)]


def _same_rule(a: Logits, b: Logits) -> bool:
    """Whether the logits differ in nothing but features and targets."""
    if a.negatives.hard_G is not None or b.negatives.hard_G is not None:  # one number for each feature
        return False
    same_rows = a.row_S is b.row_S and a.centre_LD is b.centre_LD and a.bias_S is b.bias_S
    return same_rows and (a.scale, a.negatives, a.sub_centres) == (b.scale, b.negatives, b.sub_centres)


def sum_gradients(parts: Sequence[DeferredGradient], kernel: Kernel) -> tuple[Tensor | None, Tensor]:
    """(rows, gradient) of several backwards over overlapping rows; here the gradient does exist as a whole."""
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
