"""Softmax cross-entropy on logits that the model computes: a head without class centres, for few classes.

Letters: B local batch, G global batch, C classes.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, nll_loss

from partial_fc.comm import SingleWorld, World
from partial_fc.head.protocol import Table


class CrossEntropy(AbstractContextManager):
    """A head without parameters, with the methods of PartialFC.

        loss = head(logit_BC, label_B)  # equal on every rank: the mean over the global batch
        loss.backward()                 # logit_BC.grad = d(loss)/d(these rows), exact: nothing is to be divided again

    One collective a forward, head/cross_entropy: an all-reduce of (sum of losses, rows, labels outside of the range),
    24 bytes. The batch sizes of the ranks may differ, and be 0.
    """

    def __init__(self, num_classes: int, world: World | None = None, dtype: torch.dtype = torch.float32):
        """dtype: what the loss is computed in; float64 is for checks."""
        self.num_classes = num_classes
        self.world = world or SingleWorld()
        self.dtype = dtype
        # Of the last forward: this rank's losses, "loss_B", and which labels had the largest logit, "correct_B".
        self.last_step: dict[str, Tensor] = {}

    def __call__(self, logit_BC: Tensor, label_B: Tensor) -> Tensor:
        """logit_BC: floating; label_B: int64. Raises ValueError, on all ranks alike, for a label outside of [0, C)."""
        if logit_BC.dim() != 2 or logit_BC.shape[1] != self.num_classes or label_B.shape != logit_BC.shape[:1]:
            raise ValueError(
                f"{self.world}: logits {tuple(logit_BC.shape)} with labels {tuple(label_B.shape)}; expected "
                f"(B, {self.num_classes}) and (B,)"
            )
        return _Loss.apply(logit_BC, label_B, self)

    def row_losses(self, last_step: dict[str, Tensor], num_rows: int) -> Tensor:
        """The losses of this rank's rows, from `last_step` as a forward left it: (num_rows,)."""
        return last_step["loss_B"]

    # ---- there are no class centres: nothing to update, to store or to reshard

    def finite(self) -> Tensor:
        return torch.ones((), dtype=torch.bool)

    def gradient_square_sum(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def tables(self) -> dict[str, Table]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def _nothing(self, *_: object) -> None:
        """No classes have to be chosen, no gradient of rows is pending, no file is open."""

    prepare = discard = scale_gradient = step = load = close = __exit__ = _nothing


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logit_BC: Tensor, label_B: Tensor, head: CrossEntropy) -> Tensor:
        log_p_BC = log_softmax(logit_BC.detach().to(head.dtype), dim=1)
        safe_B = label_B.clamp(0, head.num_classes - 1)
        loss_B = nll_loss(log_p_BC, safe_B, reduction="none")
        head.last_step = {"loss_B": loss_B, "correct_B": log_p_BC.argmax(1) == label_B}
        total, num_outside = (x.sum(dtype=torch.float64) for x in (loss_B, safe_B != label_B))
        numbers = torch.stack((total, total.new_full((), len(loss_B)), num_outside))
        total, num_rows, num_outside = head.world.all_reduce(numbers, name="head/cross_entropy").unbind()
        if num_outside:
            here = label_B[safe_B != label_B][:5].tolist()
            shown = f"here {', '.join(map(str, here))}" if here else "none on this rank"
            raise ValueError(
                f"{head.world}: {int(num_outside)} labels of the global batch lie outside [0, {head.num_classes}) "
                f"({shown})"
            )
        ctx.save_for_backward(log_p_BC, label_B)
        ctx.num_rows, ctx.dtype = num_rows, logit_BC.dtype
        return (total / num_rows).to(head.dtype)

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        log_p_BC, label_B = ctx.saved_tensors
        grad_BC = log_p_BC.exp()
        grad_BC.scatter_add_(1, label_B[:, None], grad_BC.new_full((len(label_B), 1), -1))
        return grad_BC.mul_(grad_loss / ctx.num_rows).to(ctx.dtype), None, None
