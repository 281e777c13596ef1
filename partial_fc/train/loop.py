"""The training loop, top to bottom."""

import math
import time
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partial_fc import checkpoint, keyed
from partial_fc.comm import World
from partial_fc.data import Loader
from partial_fc.evaluate import Verification
from partial_fc.evaluate import plot as plot_roc
from partial_fc.head import PartialFC, telemetry
from partial_fc.models import normalise
from partial_fc.optim.backbone import named_state, set_lr
from partial_fc.optim.gradient_sync import GradientSync, average_batch_norm
from partial_fc.optim.schedule import Schedule
from partial_fc.train.log import LossCurve, Progress
from partial_fc.train.stopwatch import Stopwatch


@dataclass
class Job:
    """What a recipe puts together and `train` uses up."""

    # who
    world: World
    device: torch.device
    seed: int
    # what learns from what
    loader: Loader
    backbone: nn.Module
    head: PartialFC
    # how
    optimizer: torch.optim.Optimizer
    sync: GradientSync
    schedule: Schedule
    dtype: torch.dtype  # of parameters and centres
    autocast: bool  # the backbone computes in bfloat16
    clip: float  # largest norm of the whole gradient (of the backbone's, with head_clip); 0: any
    head_clip: float  # largest norm of the centres' gradient; 0: see clip
    head_lr_ratio: float  # learning rate of the centres over the schedule's
    # what comes out
    models_root: Path
    logger: Logger
    verifications: list[Verification]
    verbose: int  # steps between evaluations; 0: only at the end
    frequent: int  # steps between lines
    telemetry_every: int  # steps between looks at the head's rows; 0: never
    checkpoint_every: int  # steps; 0: only at the end
    keep_checkpoints: int
    configuration: dict[str, Any]
    # where it stands
    step: int = 0
    position: int = 0  # in the data: samples consumed by all ranks
    best: dict[str, float] = field(default_factory=dict)


@dataclass
class Outcome:
    """Of a finished run, equal on every rank."""

    loss: float
    images_per_s: float
    evaluations: dict[str, float]
    traffic: dict[
        str, dict[str, float]
    ]  # of this rank, by collective: calls and bytes a step, evaluations included


def train(job: Job) -> Outcome:
    """Runs job's steps from where it stands to the schedule's end, evaluates, and writes the last checkpoint."""
    total_steps = job.schedule.total_steps
    global_batch = job.loader.global_batch_size
    watch = Stopwatch(job.world, job.device)
    progress = Progress(
        job.logger, job.models_root, job.world, job.frequent, job.step, total_steps, global_batch
    )
    curve = LossCurve(job.models_root, job.world, job.step)
    evaluations: dict[str, float] = {}
    evaluated = saved = job.step if job.step == total_steps else -1
    loss_value = math.nan
    first_step = job.step
    job.backbone.train()

    while job.step < total_steps:
        # Whatever draws random numbers in a step (dropout) draws them by (seed, step, rank): resuming is exact.
        torch.manual_seed(keyed.fold(job.seed, job.step, job.world.rank))
        lr = job.schedule.lr(job.step)
        report = progress.due(job.step + 1)
        watch.begin(exact=report)

        # ---- data
        batch = next(job.loader)
        image_B3HW = batch.image_B3HW.to(job.device, non_blocking=True)
        label_B = batch.label_B.to(job.device, non_blocking=True)
        watch.lap("data")

        # ---- backbone, forward
        job.sync.zero()
        with torch.autocast(job.device.type, torch.bfloat16, enabled=job.autocast):
            feat_BD = job.backbone(normalise(image_B3HW).to(job.dtype))
        watch.lap("backbone")

        # ---- head, forward and backward: three collectives; its input is a leaf, so that the two backwards part
        feat_leaf_BD = feat_BD.detach().requires_grad_()
        loss = job.head(feat_leaf_BD, label_B)
        loss.backward()
        loss_value = loss.item()
        check_finite(loss_value, job)
        watch.lap("head")

        # ---- backbone, backward: gradients leave for the other ranks as they appear
        feat_BD.backward(feat_leaf_BD.grad)
        watch.lap("backbone")

        # ---- update: the centres move while the last of those gradients travel, if no norm has to be known first
        clipping = bool(job.clip or job.head_clip)
        if clipping:
            job.sync.wait()
            clip_gradients(job)
        job.head.step(lr * job.head_lr_ratio)
        watch.lap("head")
        if not clipping:
            job.sync.wait()
        set_lr(job.optimizer, lr)
        job.optimizer.step()
        watch.lap("backbone")
        job.step += 1
        job.position = batch.position
        curve.add(job.step, loss_value, lr)
        progress.advance()

        # ---- say, evaluate, save
        if report:
            progress.report(job.step, batch.epoch, loss_value, lr, watch.take())
        if job.telemetry_every and job.step % job.telemetry_every == 0:
            look_at_rows(job, progress)
        paused = time.perf_counter()
        if job.verbose and job.step % job.verbose == 0:
            evaluations = evaluate(job, progress)
            evaluated = job.step
        if job.checkpoint_every and job.step % job.checkpoint_every == 0:
            save(job)
            saved = job.step
        progress.pause(time.perf_counter() - paused)

    if evaluated != total_steps or not evaluations:
        evaluations = evaluate(job, progress)
    if saved != total_steps:
        save(job)
    progress.close()
    curve.close()
    traffic = job.world.traffic.per_step(max(1, job.step - first_step))
    return Outcome(loss_value, progress.images_per_s, evaluations, traffic)


def check_finite(loss: float, job: Job) -> None:
    """The loss is one number for all ranks, so all of them stop here, before anything has been updated."""
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss} at step {job.step + 1}; nothing was updated in this step. The last checkpoint stands. "
            "Usual causes: a learning rate that is too high (try --lr or --warmup-steps), or damaged images"
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


def look_at_rows(job: Job, progress: Progress) -> None:
    """Telemetry of the head; classes whose centres almost coincide are named."""
    report = telemetry.observe(job.head)
    progress.scalars(job.step, report.scalars)
    progress.histograms(job.step, report.histograms)
    if report.similar:
        named = ", ".join(f"{one} and {other} ({cos:.2f})" for one, other, cos in report.similar[:3])
        job.logger.info(
            f"step {job.step}: of {telemetry.NUM_QUERIES} classes that were looked at, {len(report.similar)} have "
            f"another one's centre at a cosine above {telemetry.SIMILAR}: {named}. If that lasts: one identity, two "
            "numbers?"
        )


def evaluate(job: Job, progress: Progress) -> dict[str, float]:
    """All verification sets, on all ranks; remembers the best accuracies."""
    average_batch_norm(job.backbone, job.world)
    job.backbone.eval()

    def embed(image_N3HW: Tensor) -> Tensor:
        with torch.autocast(job.device.type, torch.bfloat16, enabled=job.autocast):
            return job.backbone(normalise(image_N3HW.to(job.device)).to(job.dtype)).float()

    values: dict[str, float] = {}
    for verification in job.verifications:
        found = dict(verification.run(embed, job.world))
        name = verification.name
        accuracy = found[f"{name}/accuracy"]
        job.best[name] = max(accuracy, job.best.get(name, 0.0))
        job.logger.info(
            f"[{name}][{job.step}] accuracy {accuracy:.5f}+-{found[f'{name}/accuracy_std']:.5f} "
            f"highest {job.best[name]:.5f} tar@far=1e-3 {found[f'{name}/tar@far=1e-3']:.5f} "
            f"xnorm {found[f'{name}/xnorm']:.3f}"
        )
        progress.scalars(job.step, {f"verification/{key}": value for key, value in found.items()})
        values.update(found)
    if job.verifications and job.world.rank == 0:
        curves = {v.name: v.roc for v in job.verifications if v.roc is not None}
        plot_roc(curves, job.models_root / "roc.png")
    job.backbone.train()
    return values


def save(job: Job) -> None:
    """A checkpoint of everything that the next step depends on."""
    average_batch_norm(job.backbone, job.world)
    facts = {"position": job.position, "best": job.best, "configuration": job.configuration}
    folder = checkpoint.save(
        job.models_root / "checkpoints",
        job.step,
        job.backbone.state_dict(),
        named_state(job.optimizer, job.backbone),
        job.head,
        facts,
        job.world,
        job.keep_checkpoints,
    )
    job.logger.info(f"checkpoint {folder}")
