"""Batch norm over the global batch, on the CPU and on GPUs, over every backend of `comm`.

torch.nn.SyncBatchNorm does the same, but only on CUDA and over torch.distributed. Plain batch norms have running
statistics that differ between ranks: these are joined for evaluation and checkpoints.

B local rows (any number on each rank), C channels, N values of a channel over all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from partial_fc.comm import World

Moments = tuple[Tensor, Tensor, Tensor]  # mean and biased variance, float64 (C,), and the count N, float64 ()


def convert(model: nn.Module, world: World) -> nn.Module:
    """Replaces each BatchNorm1d, 2d and 3d of the model by one over the global batch; returns the model.

    Parameters and buffers are the same objects under the same names. Two collectives a layer and step:
    `sync_bn/PATH/forward`, an all-reduce of 2C + 1 float64, and `sync_bn/PATH/backward`, one of 2C float32. A world of
    one computes alike: torch's float32 sums differ in the sixth digit, which shows within fifty steps of training.
    """
    for path, module in list(model.named_modules()):
        if type(module) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            continue
        assert isinstance(module, _BatchNorm)
        if not module.affine or not module.track_running_stats or module.momentum is None:
            raise ValueError(f"{path}: cannot share {module}: expected affine, with running statistics and a momentum")
        if not path:  # the model is a batch norm
            return GlobalBatchNorm(module, world, "root")
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, GlobalBatchNorm(module, world, path))
    return model


class GlobalBatchNorm(_BatchNorm):
    """Batch norm over all ranks: x (B, C, ...) -> the same shape and dtype. In eval mode it needs no collectives.

    In training mode the statistics are those of all ranks' rows together, and the running variance is the unbiased one
    of the global batch, so that running statistics stay equal on all ranks.

    Gradients follow this project's rule: the loss is the mean over the global batch, and gradients are summed. That of
    x is exact: it includes the effect of this rank's rows on other ranks' outputs. Those of weight and bias are this
    rank's contribution only: the trainer sums parameters' gradients over the ranks later.
    """

    def __init__(self, source: _BatchNorm, world: World, path: str):
        super().__init__(source.num_features, eps=source.eps, momentum=source.momentum)
        self.weight, self.bias = source.weight, source.bias
        self.running_mean, self.running_var = source.running_mean, source.running_var
        self.num_batches_tracked = source.num_batches_tracked
        self.train(source.training)
        self.world = world
        self.path = path
        # The moments of the last batch in training mode. If set before a forward, they are used for it: a recomputation
        # (activation_checkpointing.py) sends nothing and is not counted a second time.
        self.latest_moments: Moments | None = None
        self.given_moments: Moments | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        moments = self.given_moments
        if moments is None:
            moments = _global_moments(input.detach(), self.world, self.path)
            self._count(moments)
        self.latest_moments = moments
        return _Normalise.apply(input, self.weight, self.bias, moments, self)

    @torch.no_grad()
    def _count(self, moments: Moments) -> None:
        """Counts one more batch in the running statistics."""
        # For the type checker: `convert` takes no other kind.
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        mean_C, var_C, count = moments
        self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), self.momentum)
        unbiased_C = (var_C * count / (count - 1)).to(self.running_var.dtype)
        self.running_var.lerp_(unbiased_C, self.momentum)
        self.num_batches_tracked += 1


def _global_moments(x: Tensor, world: World, path: str) -> Moments:
    """Returns the moments of each channel over all ranks.

    The local variance is centred on the local mean; the sums exchanged are float64, so that their difference keeps the
    digits of a float32 input, even if its mean is much larger than its spread.
    """
    axes = [axis for axis in range(x.dim()) if axis != 1]
    local_count = x.numel() // x.shape[1]
    if local_count:
        var_C, mean_C = torch.var_mean(_wide(x), axes, correction=0)
        mean_C, var_C = mean_C.double(), var_C.double()
    else:
        mean_C = var_C = x.new_zeros(x.shape[1], dtype=torch.float64)
    local = torch.cat([mean_C, var_C + mean_C.square(), mean_C.new_ones(1)]) * local_count
    total = world.all_reduce(local, name=f"sync_bn/{path}/forward")
    count = total[-1]
    # A total of 1 implies 1 or 0 rows on every rank: only then is the number read, which waits for a GPU.
    if local_count <= 1 and count.item() <= 1:
        raise ValueError(f"{path}: the global batch has {int(count)} value(s) per channel; a variance needs 2 or more")
    mean_C, square_C = (total[:-1] / count).chunk(2)
    return mean_C, (square_C - mean_C.square()).clamp(min=0), count  # rounding may give less than 0 for equal values


class _Normalise(torch.autograd.Function):
    """Returns (x - mean) / sqrt(var + eps) * weight + bias, with statistics that depend on all ranks' x."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight_C: Tensor, bias_C: Tensor, moments: Moments, norm: GlobalBatchNorm
    ) -> Tensor:
        mean_C, var_C, count = moments
        mean_C, var_C = mean_C.to(weight_C.dtype), var_C.to(weight_C.dtype)
        ctx.save_for_backward(x, weight_C, mean_C, var_C, count)
        ctx.norm = norm  # type: ignore[attr-defined]
        return F.batch_norm(x, mean_C, var_C, weight_C, bias_C, eps=norm.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight_C, mean_C, var_C, count = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        scale_C = torch.rsqrt(var_C + ctx.norm.eps)
        xhat = (_wide(x) - mean_C.view(shape)) * scale_C.view(shape)
        dy_wide = _wide(dy)
        bias_grad_C = dy_wide.sum(axes)
        weight_grad_C = (dy_wide * xhat).sum(axes)
        local = torch.cat([bias_grad_C, weight_grad_C])
        total = ctx.norm.world.all_reduce(local, name=f"sync_bn/{ctx.norm.path}/backward")
        # Every x also changes the shared mean and variance, which removes a part of dy.
        dy_mean_C, dy_xhat_mean_C = (total / count.to(total.dtype)).chunk(2)
        dx = dy_wide - dy_mean_C.view(shape) - xhat * dy_xhat_mean_C.view(shape)
        dx = (dx * (weight_C * scale_C).view(shape)).to(x.dtype)
        return dx, weight_grad_C, bias_grad_C, None, None


def _wide(t: Tensor) -> Tensor:
    """Returns 16-bit numbers as float32, for sums; others as they are."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


class RunningStatistics:
    """A copy of the running statistics, to undo a forward pass: one that overflows would leave NaN in them although its
    update is skipped. (No other layer has buffers.)"""

    def __init__(self, module: nn.Module):
        self._buffers = list(module.buffers())
        self._kept = [b.clone() for b in self._buffers]

    @torch.no_grad()
    def keep(self) -> None:
        if self._kept:
            torch._foreach_copy_(self._kept, self._buffers)

    @torch.no_grad()
    def restore(self) -> None:
        if self._kept:
            torch._foreach_copy_(self._buffers, self._kept)


@contextmanager
def joined_statistics(module: nn.Module, world: World) -> Iterator[None]:
    """Gives the batch norms the running statistics of all ranks together inside the block, and restores their own, so
    that evaluations do not change training. A collective."""
    own = RunningStatistics(module)
    average_batch_norm(module, world)
    try:
        yield
    finally:
        own.restore()


@torch.no_grad()
def average_batch_norm(module: nn.Module, world: World) -> None:
    """Joins all ranks' running statistics: mean of means, mean variance plus variance of means. A collective."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    moments: list[tuple[Tensor, Tensor]] = [(m.running_mean, m.running_var) for m in layers]  # type: ignore[misc]
    if world.size == 1 or not moments:
        return
    both = [torch.cat((mean.double(), var.double() + mean.double().square())) for mean, var in moments]
    total = world.all_reduce(torch.cat(both), name="backbone/batch_norm") / world.size
    for (mean, var), part in zip(moments, total.split([len(b) for b in both]), strict=True):
        joined_mean, joined_square = part.chunk(2)
        mean.copy_(joined_mean)
        var.copy_(joined_square - joined_mean.square())
