"""One update of backbone and class centres, from its micro-batches."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from partial_fc.comm import World
from partial_fc.data import Batch
from partial_fc.train.guards.nan_report import find_first_non_finite
from partial_fc.train.guards.policy import Attempt, NonFinite, Pass, skip, undo, weights_are_finite
from partial_fc.train.job import Job


class Stopwatch:
    """Splits time into named parts; time spent waiting for other ranks goes to "communication".

    GPU work is asynchronous, so parts are only separated in steps marked `exact`, which wait after each part.
    """

    def __init__(self, world: World, device: torch.device):
        self._world = world
        self._on_gpu = device.type == "cuda"
        self.exact = not self._on_gpu
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.restart()

    def lap(self, part: str) -> None:
        """Adds the time since the last lap to `part`."""
        if not self.exact:
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        waited = self._world.seconds_waiting - self._waiting
        self.seconds[part] += time.perf_counter() - self._started - waited
        self.seconds["communication"] += waited
        self.restart()

    def tell_apart(self, exact: bool) -> None:
        """exact: separates this step's parts even on a GPU."""
        self.exact = exact or not self._on_gpu

    def drain_shares(self) -> dict[str, float]:
        """Returns the shares of the parts since the last call; they add up to 1."""
        total = sum(self.seconds.values()) or 1.0
        shares = {part: seconds / total for part, seconds in self.seconds.items()}
        self.seconds.clear()
        return shares

    def restart(self) -> None:
        """Discards the time since the last lap."""
        self._started = time.perf_counter()
        self._waiting = self._world.seconds_waiting


def update(job: Job, batches: Sequence[Batch], lr: float, watch: Stopwatch) -> float:
    """Runs forward, backward and update with these micro-batches, whose gradients are summed; returns the loss, equal
    on all ranks: the mean over all samples of the update.

    Raises NonFinite, on all ranks, for NaN or Inf in loss or gradient, except with --on-nan skip or by a loss scale.
    """
    attempt = Attempt(batches)
    try:
        _update(job, attempt, lr, watch)
    except NonFinite as error:
        fault = NonFinite(find_first_non_finite(job, attempt, str(error)), error.hopeless)
        if job.guards.on_nan != "skip":
            raise fault from None
        skip(job, fault)
    else:
        job.guards.num_skips = 0
    return attempt.loss


def _update(job: Job, attempt: Attempt, lr: float, watch: Stopwatch) -> None:
    backbone, head, settings, batches = job.backbone, job.head, job.settings, attempt.batches
    label_NB = [batch.label_B.to(backbone.device, non_blocking=True) for batch in batches]

    # ---- forward and backward; the last backward starts the exchange of each gradient
    num_samples = sum(batch.num_global for batch in batches)
    backbone.zero(num_samples)
    if len(batches) > 1:
        head.prepare(torch.cat(label_NB))
    for number, batch in enumerate(batches):
        with backbone.hold() if number + 1 < len(batches) else nullcontext():
            forward_backward(job, attempt, batch, label_NB[number], batch.num_global / num_samples, watch)

    # ---- decision: all ranks update, or none does. Here the host waits for the device once.
    backbone.wait()
    guard = overflowed(job) if backbone.scaler else backbone.gradient_sum()
    scalars = [guard, *(loss for loss, _ in attempt.losses), *square_sums(job)]
    guarded, *numbers = torch.stack([one.to(backbone.device) for one in scalars]).tolist()
    attempt.loss = sum(number * factor for number, (_, factor) in zip(numbers, attempt.losses, strict=False))
    if backbone.scaler is None:
        check(job, attempt.loss, guarded)
    elif guarded or not math.isfinite(attempt.loss):
        check_loss_scale(job, attempt.loss)
        undo(job)
        lower_loss_scale(job)
        return
    clip_gradients(job, *numbers[len(batches) :])

    # ---- update
    watch.lap("backbone")
    head.step(lr * settings.head_lr_ratio)
    watch.lap("head")
    backbone.step(lr)
    watch.lap("backbone")


def forward_backward(job: Job, attempt: Attempt, batch: Batch, label_B: Tensor, share: float, watch: Stopwatch) -> None:
    """Runs one micro-batch, with this share of the update's samples, with the head's collectives. The head's input is a
    leaf, which separates the two backwards."""
    weight = 1.0 if job.settings.accumulate_sum else share
    job.backbone.name_samples(batch.position_B)
    output_B = job.backbone.forward(batch.input_B)
    watch.lap("backbone")

    weights = {} if batch.weight_B is None else {"row_weight_B": batch.weight_B}
    loss = job.head(output_B, label_B, **weights)
    loss = loss if weight == 1.0 else loss * weight
    if job.teacher:
        watch.lap("head")
        loss = loss + job.teacher(output_B, batch.input_B, batch.num_global, weight).to(loss.dtype)
        watch.lap("teacher")
    attempt.passes.append(Pass(output_B, job.head.last_step))
    loss.backward()
    attempt.losses.append((loss.detach(), share / weight))
    watch.lap("head")

    assert output_B.grad is not None
    job.backbone.backward(output_B.grad)
    watch.lap("backbone")


def check(job: Job, loss: float, gradient_sum: float) -> None:
    """Raises NonFinite for NaN or Inf in the loss or the backbone's gradient, which are equal on all ranks. The latter
    covers the centres' gradient: a NaN or Inf slope spoils the features' gradient, and so all."""
    if not math.isfinite(loss):
        raise NonFinite(f"the loss is {loss} at step {job.at.step + 1}{_usual_causes(job)}")
    if math.isfinite(gradient_sum) or job.backbone.finite():
        return
    if job.backbone.may_overflow:
        raise NonFinite(
            f"the gradient exceeds what float16 holds at step {job.at.step + 1}: leave --gradient-compression fp16 "
            "out, take bf16, or --precision fp16, whose loss scale gives way"
        )
    raise NonFinite(f"the backbone's gradient is not finite at step {job.at.step + 1}{_usual_causes(job)}")


def check_loss_scale(job: Job, loss: float) -> None:
    """Handles an overflow with a loss scale: usually by a smaller scale, unless there is none, or the weights
    themselves have NaN or Inf. A collective if the loss is NaN or Inf."""
    assert job.backbone.scaler is not None
    if job.backbone.scaler.is_smallest:
        raise NonFinite(f"{job.backbone.scaler.TOO_SMALL} (step {job.at.step + 1})")
    if not math.isfinite(loss) and not weights_are_finite(job):
        raise NonFinite(
            f"the loss is {loss} at step {job.at.step + 1}, and weights are not finite{_usual_causes(job)}",
            hopeless=True,
        )


def _usual_causes(job: Job) -> str:
    causes = "a learning rate that is too high (try --lr or --warmup-steps, or --clip), or damaged data"
    others = "" if job.guards.on_nan != "stop" else "; --on-nan skip and --on-nan rollback continue without the batch"
    return f" (usual causes: {causes}{others})"


def overflowed(job: Job) -> Tensor:
    """Returns whether a gradient of the update, on any rank, has NaN or Inf: 1.0 or 0.0, for all. A collective."""
    fine = job.backbone.finite() & job.head.finite().to(job.backbone.device)
    return job.world.all_reduce(1 - fine.float(), "max", name="train/overflow")


def lower_loss_scale(job: Job) -> None:
    scaler = job.backbone.scaler
    assert scaler is not None
    scale = scaler.scale
    scaler.update(overflowed=True)
    job.at.num_overflows += 1
    job.logger.info(
        f"step {job.at.step + 1}: a gradient overflowed on at least one rank; the update is skipped on all, the loss "
        f"scale goes from {scale:g} to {scaler.scale:g}"
    )


def square_sums(job: Job) -> list[Tensor]:
    """Returns the sums of squares that clipping asks for: of the backbone's gradient, and of the centres', over all
    ranks, which costs half a pass and is left out if head_clip is infinite. A collective."""
    clip, head_clip = job.settings.clip, job.settings.head_clip
    if not (clip or head_clip):
        return []
    return [job.backbone.square_sum()] + ([job.head.gradient_square_sum()] if head_clip < math.inf else [])


def clip_gradients(job: Job, square: float = 0.0, head_square: float = 0.0) -> None:
    """Scales backbone's and centres' gradient so that their joint norm is at most clip; with head_clip each
    separately. square, head_square: what `square_sums` returns."""
    clip, head_clip = job.settings.clip, job.settings.head_clip
    factor = _shrink(square if head_clip else square + head_square, clip)
    if factor < 1.0:
        job.backbone.scale(factor)
    factor = _shrink(head_square, head_clip) if head_clip else factor
    if factor < 1.0:
        job.head.scale_gradient(factor)


def _shrink(square_sum: float, largest: float) -> float:
    """Returns the factor that reduces a gradient to the largest norm (0: any)."""
    norm = math.sqrt(square_sum)
    return largest / norm if largest and norm > largest else 1.0
