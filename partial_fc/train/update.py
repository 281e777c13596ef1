"""One update of backbone and centres, from the micro-batches that it is made of."""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from partial_fc.data import Batch
from partial_fc.models import normalise
from partial_fc.optim.backbone import set_lr
from partial_fc.train.job import Job
from partial_fc.train.precision import RunningStatistics
from partial_fc.train.stopwatch import Stopwatch


def update(
    job: Job, batches: Sequence[Batch], lr: float, before: RunningStatistics, watch: Stopwatch
) -> float:
    """Forward, backward and update with these micro-batches, whose gradients are added up; returns the loss, which is
    equal on all ranks. before: takes up the running statistics that an overflow goes back to."""
    scaler = job.precision.scaler
    label_NB = [batch.label_B.to(job.device, non_blocking=True) for batch in batches]
    before.keep()

    # ---- forward and backward; gradients leave for the other ranks as the last backward finds them
    job.sync.zero(job.precision.loss_scale, job.loader.global_batch_size * len(batches))
    if len(batches) > 1:
        job.head.prepare(torch.cat(label_NB))
    loss = 0.0
    for number, batch in enumerate(batches):
        with job.sync.hold() if number + 1 < len(batches) else nullcontext():
            loss += forward_backward(job, batch.image_B3HW, label_NB[number], 1 / len(batches), watch)

    # ---- verdict: the update is made on all ranks or on none
    clipping = bool(job.clip or job.head_clip)
    at_once = not clipping and scaler is None and not job.sync.may_overflow
    if not at_once:
        job.sync.wait()
    if scaler and overflowed(job, loss):
        before.restore()
        skip(job)
        return loss
    if job.sync.may_overflow and not job.sync.finite():  # equal on all ranks: it is about their sum
        raise FloatingPointError(
            f"the gradient exceeds what float16 holds at step {job.step + 1}; nothing was updated in this step. Leave "
            "--gradient-compression fp16 out, take bf16, or --precision fp16, whose loss scale gives way"
        )
    if clipping:
        clip_gradients(job)

    # ---- the centres move, where nothing had to be known first while the last gradients travel; then the backbone
    watch.lap("backbone")
    job.head.step(lr * job.head_lr_ratio)
    watch.lap("head")
    if at_once:
        job.sync.wait()
    set_lr(job.optimizer, lr)
    job.optimizer.step()
    job.weights.publish()
    if scaler:
        scaler.update(overflowed=False)
    watch.lap("backbone")
    return loss


def forward_backward(job: Job, image_B3HW: Tensor, label_B: Tensor, share: float, watch: Stopwatch) -> float:
    """One micro-batch; returns its part of the update's loss, of which it is this share. The head's three collectives
    are in here; its input is a leaf, so that the two backwards part."""
    image_B3HW = image_B3HW.to(job.device, non_blocking=True)
    with job.precision.autocast():
        feat_BD = job.backbone(job.precision.as_input(normalise(image_B3HW)))
    watch.lap("backbone")

    feat_leaf_BD = feat_BD.detach().to(job.head.dtype).requires_grad_()
    loss = job.head(feat_leaf_BD, label_B) * share
    loss.backward()
    loss_value = loss.item()
    check_finite(loss_value, job)
    watch.lap("head")

    # The head's own gradient is never 16 bits wide: the loss scale is the backbone's alone.
    assert feat_leaf_BD.grad is not None
    feat_BD.backward((feat_leaf_BD.grad * job.precision.loss_scale).to(feat_BD.dtype))
    watch.lap("backbone")
    return loss_value


def check_finite(loss: float, job: Job) -> None:
    """The loss is one number for all ranks, so all of them stop here, before anything has been updated. (With a loss
    scale the verdict comes after backward: `overflowed`.)"""
    if not math.isfinite(loss) and job.precision.scaler is None:
        raise FloatingPointError(
            f"the loss is {loss} at step {job.step + 1}; nothing was updated in this step. The last checkpoint stands. "
            "Usual causes: a learning rate that is too high (try --lr or --warmup-steps), or damaged images"
        )


def overflowed(job: Job, loss: float) -> bool:
    """One verdict for all ranks, and for backbone and head together: whether any number of the update, on any rank, is
    not finite. A collective."""
    fine = job.sync.finite() & job.head.finite().to(job.device) & math.isfinite(loss)
    return bool(job.world.all_reduce(1 - fine.float(), "max", name="train/overflow").item())


def skip(job: Job) -> None:
    """The update is not made, on no rank: weights, centres, and what compression and margin remember stay."""
    assert job.precision.scaler is not None
    job.sync.undo()
    job.head.discard()
    scale = job.precision.scaler.scale
    job.precision.scaler.update(overflowed=True)
    job.logger.info(
        f"step {job.step + 1}: a gradient overflowed on at least one rank; the update is skipped on all, the loss "
        f"scale goes from {scale:g} to {job.precision.scaler.scale:g}"
    )


def clip_gradients(job: Job) -> None:
    """Scales backbone's and centres' gradient alike so that their joint norm, over all ranks, is at most clip; with
    head_clip each by itself. The norm of the centres' gradient costs half a pass over them, as it is never stored."""
    square = job.sync.square_sum()
    if job.clip and not job.head_clip:
        square = square + job.head.gradient_square_sum()
    factor = _shrink(square, job.clip)
    if factor < 1.0:
        job.sync.scale(factor)
    head_factor = _shrink(job.head.gradient_square_sum(), job.head_clip) if job.head_clip else factor
    if head_factor < 1.0:
        job.head.scale_gradient(head_factor)


def _shrink(square_sum: Tensor, largest: float) -> float:
    """What brings a gradient to the largest norm allowed (0: any)."""
    norm = square_sum.sqrt().item()
    return largest / norm if largest and norm > largest else 1.0
