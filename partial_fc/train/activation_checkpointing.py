"""Activation checkpointing: a block's activations are recomputed in the backward pass instead of being kept.

(Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174.)
"""

from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from partial_fc.models import BLOCKS, NAMES
from partial_fc.train.batch_norm import GlobalBatchNorm, Moments


def enable(model: nn.Module) -> nn.Module:
    """Makes each block of the model (models.BLOCKS) keep only its input for the backward pass, and recompute the rest
    there; returns the model.

    Results are bit-identical: loss, gradients, random numbers, and running statistics, which count a batch once. Batch
    norms over all ranks send nothing twice. State-dict names stay. It costs about one more forward pass: a third of the
    arithmetic. It has no effect without gradients (torch.no_grad).

    Raises ValueError for a model without such blocks.
    """
    blocks = [module for module in model.modules() if isinstance(module, BLOCKS)]
    if not blocks:
        raise ValueError(
            f"--activation-checkpointing: {type(model).__name__} has no blocks to compute again, expected one of "
            f"{', '.join(NAMES)}; leave the flag off for this network"
        )
    for block in blocks:
        # A bound method of the block, so that a copy of the model has one of its own.
        block.forward = MethodType(_forward, block)  # type: ignore[method-assign]
    return model


def _forward(block: nn.Module, x: Tensor) -> Tensor:
    first = partial(type(block).forward, block)
    if torch.compiler.is_compiling():  # --compile: a batch norm's counts are outside of what is computed again
        return checkpoint(first, x, use_reentrant=False)
    return checkpoint(first, x, use_reentrant=False, context_fn=partial(_contexts, block))


def _contexts(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Returns the contexts of the first computation of a block, and of each later one."""
    again = _Again(block)
    first = ExitStack()
    first.callback(again.remember_moments)
    return first, again


class _Again(AbstractContextManager):
    """The context of a recomputation: the block's batch norms reuse their statistics, and count no batch."""

    def __init__(self, block: nn.Module):
        norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
        self._global = [norm for norm in norms if isinstance(norm, GlobalBatchNorm)]
        self._local = [norm for norm in norms if not isinstance(norm, GlobalBatchNorm)]
        self._moments: list[Moments | None] = []
        self._kept: list[tuple[_BatchNorm, str, Tensor]] = []

    def remember_moments(self) -> None:
        """Keeps the moments of the last computation's global batch, which came from other ranks."""
        self._moments = [norm.latest_moments for norm in self._global]

    def __enter__(self) -> None:
        for shared, moments in zip(self._global, self._moments, strict=True):
            shared.given_moments = moments
        # Redirects torch's counts into copies. (With track_running_stats off they would keep fewer tensors for backward
        # than the first time, which checkpoint refuses; momentum 0 would turn an infinite statistic into NaN.)
        self._kept = [(norm, name, b) for norm in self._local for name, b in norm.named_buffers()]
        for norm, name, buffer in self._kept:
            setattr(norm, name, buffer.clone())

    def __exit__(self, *_error: object) -> None:
        for norm, name, buffer in self._kept:
            setattr(norm, name, buffer)
        for shared in self._global:
            shared.given_moments = None
        self._kept = []
