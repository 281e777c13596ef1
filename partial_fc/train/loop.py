"""The training loop, top to bottom."""

import math
import time
from contextlib import closing

import torch
from torch import Tensor, nn

from partial_fc import checkpoint, keyed
from partial_fc.evaluate import plot as plot_roc
from partial_fc.head import telemetry
from partial_fc.models import normalise
from partial_fc.optim.backbone import named_state
from partial_fc.train import replicas, spikes
from partial_fc.train.agreement import Agreement
from partial_fc.train.job import Job, Outcome
from partial_fc.train.log import LossCurve, Progress, dispensable
from partial_fc.train.non_finite import NonFinite, roll_back
from partial_fc.train.running_statistics import RunningStatistics, joined_statistics
from partial_fc.train.signals import StopSignals
from partial_fc.train.stopwatch import Stopwatch
from partial_fc.train.update import update


def train(job: Job) -> Outcome:
    """Runs job's steps from where it stands to the schedule's end, evaluates, and writes the last checkpoint; ends
    early, with a checkpoint, where any rank was asked to by SIGTERM or SIGUSR1. Raises elastic.HostsChanged, on all
    ranks, where these are to meet in another world."""
    steps, global_batch = job.schedule.total_steps, job.loader.global_batch_size * job.accumulate
    progress = Progress(job.logger, job.models_root, job.world, job.frequent, job.step, steps, global_batch)
    curve = LossCurve(job.models_root, job.world, job.step)
    with StopSignals(job.world.rank) as signals, closing(progress), closing(curve):
        return _train(job, signals, progress, curve)


def _train(job: Job, signals: StopSignals, progress: Progress, curve: LossCurve) -> Outcome:
    total_steps = job.schedule.total_steps
    watch = Stopwatch(job.world, job.device)
    agreement = Agreement(job.world)
    goes_back = job.precision.scaler or job.guards.on_nan == "skip"
    before = RunningStatistics(job.backbone if goes_back else nn.Identity())
    losses = spikes.Losses()
    job.guards.last_equal = job.step
    evaluations: dict[str, float] = {}
    evaluated = saved = job.step if job.step == total_steps else -1
    loss_value, stopped = math.nan, False
    first_step = job.step
    job.backbone.train()
    job.commits.begin(job.step, job.head, lambda: take(job))

    while job.step < total_steps and not stopped:
        # Whatever draws random numbers in a step (dropout) draws them by (seed, step, rank): resuming is exact.
        torch.manual_seed(keyed.fold(job.seed, job.step, job.world.rank))
        job.world.step = job.step + 1
        lr = job.schedule.lr(job.step)
        report = progress.due(job.step + 1)
        watch.begin(exact=report)
        agreement.begin(signals.received is not None, job.saver, job.commits.hosts_changed)
        job.commits.start_step()

        # ---- data: the micro-batches of this update
        batches = [next(job.loader) for _ in range(job.accumulate)]
        watch.lap("data")

        # ---- forward, backward, update
        try:
            loss_value = update(job, batches, lr, before, watch)
        except NonFinite as fault:
            agreement.end()
            job.saver.finish()  # a checkpoint under way is of before, and is to count whatever follows
            roll_back(job, fault, batches[-1].position)
            job.commits.go_back(lambda: take(job))
            curve.go_back(job.step)
            progress.go_back(job.step)
            continue
        job.step += 1
        job.position = batches[-1].position
        agreed = agreement.end()
        job.saver.settle(agreed.busy, agreed.failed)
        stopped = agreed.stop
        curve.add(job.step, loss_value, lr)
        progress.advance()
        if spike := losses.add(loss_value):
            spikes.note(job, spike, batches, lr)
            progress.scalars(job.step, {"train/loss_spike": loss_value})
        if job.step == first_step + 1 and job.world.size > 1:
            exchanged = job.sync.step_bytes()
            job.logger.info(
                f"the backbone's gradient is {exchanged.gradient:,} bytes a step; {exchanged.handed_in:,.0f} are "
                "handed in to be exchanged"
            )

        # ---- say, evaluate, save
        if report:
            progress.report(job.step, batches[-1].epoch, loss_value, lr, watch.take())
            if job.precision.scaler:
                progress.scalars(job.step, {"train/loss_scale": job.precision.scaler.scale})
        if job.telemetry_every and job.step % job.telemetry_every == 0:
            look_at_rows(job, progress)
        if job.guards.desync_every and job.step % job.guards.desync_every == 0:
            compare_replicas(job)
        paused = time.perf_counter()
        score, is_best = None, False
        if job.verbose and job.step % job.verbose == 0 and not stopped:
            evaluations = evaluate(job, progress)
            evaluated = job.step
            score, is_best = rate(job, evaluations)
        due = job.checkpoint_every and job.step % job.checkpoint_every == 0
        if due or stopped or (is_best and job.save_best):
            save(job, score)
            saved = job.step
        job.commits.end_step(job.step, lambda: take(job))
        if agreed.hosts_changed and job.step < total_steps and not stopped:
            job.saver.finish()
            is_there = saved == job.step and not job.saver.last_failed
            job.commits.leave(job.step, lambda: take(job), None if is_there else lambda: save_and_wait(job))
        progress.pause(time.perf_counter() - paused)

    if not stopped:
        if evaluated != total_steps or not evaluations:
            evaluations = evaluate(job, progress)
        if saved != total_steps:
            save(job, rate(job, evaluations)[0])
    job.saver.finish()
    traffic = job.world.traffic.per_step(max(1, job.step - first_step))
    return Outcome(
        loss_value,
        progress.images_per_s,
        evaluations,
        stopped,
        not job.saver.last_failed,
        traffic,
        job.sync.step_bytes(),
    )


def compare_replicas(job: Job) -> None:
    """An error, on all ranks, where they do not hold the same backbone any more."""
    scaler, head = job.precision.scaler, job.head.facts()
    facts = {"loss scale": scaler.state() if scaler else 1.0}
    facts |= {f"the head's {name}": head[name] for name in ("num_steps", "margin")}
    replicas.check(job.weights, job.optimizer, facts, job.step, job.guards.last_equal, job.world)
    job.guards.last_equal = job.step


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
    job.backbone.eval()

    def embed(image_N3HW: Tensor) -> Tensor:
        with job.precision.autocast():
            return job.backbone(job.precision.as_input(normalise(image_N3HW.to(job.device)))).float()

    values: dict[str, float] = {}
    with joined_statistics(job.backbone, job.world):
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
        with dispensable(str(job.models_root / "roc.png")):
            plot_roc(curves, job.models_root / "roc.png")
    job.backbone.train()
    return values


def rate(job: Job, evaluations: dict[str, float]) -> tuple[float | None, bool]:
    """(the mean accuracy over all verification sets, None where there are none; whether it is the best so far)."""
    accuracies = [value for name, value in evaluations.items() if name.endswith("/accuracy")]
    if not accuracies:
        return None, False
    score = sum(accuracies) / len(accuracies)
    is_best = score > job.best_score
    job.best_score = max(score, job.best_score)
    return score, is_best


def save(job: Job, score: float | None = None) -> None:
    """Takes everything that the next step depends on, and begins to write it. score: of the evaluation after this step,
    if there was one."""
    began = time.perf_counter()
    if job.saver.under_way:
        job.saver.finish()
        job.logger.info(
            f"step {job.step}: waited {time.perf_counter() - began:.2f} s for the checkpoint before to be written; the "
            "disk is slower than --checkpoint-every asks for"
        )
    job.saver.begin(take(job, score, job.saver.can_copy(job.head)), began)


def save_and_wait(job: Job) -> None:
    """`save`, all of it, now."""
    save(job)
    job.saver.finish()


def take(job: Job, score: float | None = None, copy: bool = True) -> checkpoint.Snapshot:
    """Everything that the next step depends on. A collective."""
    facts = {
        "position": job.position,
        "left_out": list(job.left_out),  # written while training goes on, as they are now
        "best": dict(job.best),
        "best_score": job.best_score,
        "score": score,
        **job.facts,
    }
    if job.precision.scaler:
        facts["loss_scaler"] = job.precision.scaler.state()
    own = {f"buffer/{name}": t for name, t in job.backbone.named_buffers()}
    own |= {f"exchange/{name}": t for name, t in job.sync.state().items()}
    own = checkpoint.copied(own)  # before the ranks' statistics are joined
    with joined_statistics(job.backbone, job.world):
        return checkpoint.take(
            job.step,
            job.weights.state_dict(),
            named_state(job.optimizer, job.weights),
            own,
            job.head,
            facts,
            world=job.world,
            class_names=job.class_names,
            copy=copy,
        )
