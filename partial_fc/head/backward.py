"""Autograd's node of the loss: waits for the features' gradient, which the forward has started to reduce."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from partial_fc.comm import Work
from partial_fc.head.pending import DeferredGradient, Pending


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
