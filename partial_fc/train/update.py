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
from partial_fc.train.look_again import look_again
from partial_fc.train.non_finite import Attempt, NonFinite, Pass, skip, undo, weights_are_finite
from partial_fc.train.running_statistics import RunningStatistics
from partial_fc.train.stopwatch import Stopwatch


def update(job: Job, batches: Sequence[Batch], lr: float, before: RunningStatistics, watch: Stopwatch) -> float:
    """Forward, backward and update with these micro-batches, whose gradients are added up; returns the loss, which is
    equal on all ranks. before: takes up the running statistics that an update that is not made goes back to.

    Raises NonFinite, on all ranks alike, where loss or gradient are not finite, unless --on-nan skip, or a loss scale
    that is too large, explains what to do about it."""
    attempt = Attempt(batches)
    before.keep()
    try:
        _update(job, attempt, lr, before, watch)
    except NonFinite as found:
        fault = NonFinite(look_again(job, attempt, str(found)), found.hopeless)
        if job.guards.on_nan != "skip":
            raise fault from None
        skip(job, attempt, before, fault)
    else:
        job.guards.num_skips = 0
    return attempt.loss


def _update(job: Job, attempt: Attempt, lr: float, before: RunningStatistics, watch: Stopwatch) -> None:
    scaler, batches = job.precision.scaler, attempt.batches
    label_NB = [batch.label_B.to(job.device, non_blocking=True) for batch in batches]

    # ---- forward and backward; gradients leave for the other ranks as the last backward finds them
    job.sync.zero(job.precision.loss_scale, job.loader.global_batch_size * len(batches))
    if len(batches) > 1:
        job.head.prepare(torch.cat(label_NB))
    for number, batch in enumerate(batches):
        with job.sync.hold() if number + 1 < len(batches) else nullcontext():
            forward_backward(job, attempt, batch.image_B3HW, label_NB[number], watch)

    # ---- verdict: the update is made on all ranks or on none
    clipping = bool(job.clip or job.head_clip)
    known_first = scaler or clipping or job.sync.may_overflow or job.guards.on_nan == "skip"
    if known_first:
        wait(job, attempt)
        if scaler and overflowed(job, attempt.loss):
            check_loss_scale(job, attempt.loss)
            undo(job, attempt, before)
            lower_loss_scale(job)
            return
        if not scaler:
            check_gradient(job)
    if clipping:
        clip_gradients(job)

    # ---- the centres move, where nothing had to be known first while the last gradients travel; then the backbone
    watch.lap("backbone")
    job.head.step(lr * job.head_lr_ratio)
    attempt.centres_moved = True
    watch.lap("head")
    if not known_first:
        wait(job, attempt)
        check_gradient(job)
    set_lr(job.optimizer, lr)
    job.optimizer.step()
    job.weights.publish()
    if scaler:
        scaler.update(overflowed=False)
    watch.lap("backbone")


def forward_backward(job: Job, attempt: Attempt, image_B3HW: Tensor, label_B: Tensor, watch: Stopwatch) -> None:
    """One micro-batch. The head's three collectives are in here; its input is a leaf, so that the two backwards
    part."""
    image_B3HW = image_B3HW.to(job.device, non_blocking=True)
    with job.precision.autocast():
        feat_BD = job.backbone(job.precision.as_input(normalise(image_B3HW)))
    watch.lap("backbone")

    feat_leaf_BD = feat_BD.detach().to(job.head.dtype).requires_grad_()
    loss = job.head(feat_leaf_BD, label_B) * (1 / len(attempt.batches))
    attempt.passes.append(Pass(label_B, feat_leaf_BD, job.head.last_step))
    loss.backward()
    attempt.loss += loss.item()
    check_loss(attempt.loss, job)
    watch.lap("head")

    # The head's own gradient is never 16 bits wide: the loss scale is the backbone's alone.
    assert feat_leaf_BD.grad is not None
    feat_BD.backward((feat_leaf_BD.grad * job.precision.loss_scale).to(feat_BD.dtype))
    watch.lap("backbone")


def wait(job: Job, attempt: Attempt) -> None:
    """Until the backbone's gradient is the sum over the ranks."""
    job.sync.wait()
    attempt.summed = True


def check_loss(loss: float, job: Job) -> None:
    """The loss is one number for all ranks, so all of them know here, before anything has been updated. (With a loss
    scale the verdict comes after backward: `overflowed`.)"""
    if not math.isfinite(loss) and job.precision.scaler is None:
        raise NonFinite(f"the loss is {loss} at step {job.step + 1}{_usual_causes(job)}")


def check_gradient(job: Job) -> None:
    """The backbone's gradient is the same sum on all ranks, so they need not ask each other. What the centres'
    gradient is made of is in it as well: a slope that is not finite spoils the features' gradient, and so all."""
    if job.sync.finite():
        return
    if job.sync.may_overflow:
        raise NonFinite(
            f"the gradient exceeds what float16 holds at step {job.step + 1}: leave --gradient-compression fp16 out, "
            "take bf16, or --precision fp16, whose loss scale gives way"
        )
    raise NonFinite(f"the backbone's gradient is not finite at step {job.step + 1}{_usual_causes(job)}")


def check_loss_scale(job: Job, loss: float) -> None:
    """With a loss scale an overflow is usual, and a smaller scale the remedy; unless there is none, or the weights
    themselves are not finite. A collective where the loss is not finite."""
    assert job.precision.scaler is not None
    if job.precision.scaler.is_smallest:
        raise NonFinite(
            f"the gradient is not finite at loss scale 1, after one halving an update, at step {job.step + 1}: it is "
            "not the scale. Usual causes: a learning rate that is too high (--lr, --warmup-steps), activations beyond "
            "what fp16 holds (try --precision bf16 or fp32), or damaged images"
        )
    if not math.isfinite(loss) and not weights_are_finite(job):
        raise NonFinite(
            f"the loss is {loss} at step {job.step + 1}, and weights are not finite{_usual_causes(job)}",
            hopeless=True,
        )


def _usual_causes(job: Job) -> str:
    causes = "a learning rate that is too high (try --lr or --warmup-steps, or --clip), or damaged images"
    others = "" if job.guards.on_nan != "stop" else "; --on-nan skip and --on-nan rollback go on without the batch"
    return f" (usual causes: {causes}{others})"


def overflowed(job: Job, loss: float) -> bool:
    """One verdict for all ranks, and for backbone and head together: whether any number of the update, on any rank, is
    not finite. A collective."""
    fine = job.sync.finite() & job.head.finite().to(job.device) & math.isfinite(loss)
    return bool(job.world.all_reduce(1 - fine.float(), "max", name="train/overflow").item())


def lower_loss_scale(job: Job) -> None:
    assert job.precision.scaler is not None
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
