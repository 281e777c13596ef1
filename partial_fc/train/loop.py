"""The training loop."""

import math
import time
from contextlib import closing
from functools import partial
from typing import Any

import torch

from partial_fc import checkpoint, counter_rng
from partial_fc.accessories import spare
from partial_fc.checkpoint import consistency
from partial_fc.checkpoint.folders import folder_name
from partial_fc.checkpoint.lock import LostLock
from partial_fc.comm import all_or_none
from partial_fc.comm.launch import restarts
from partial_fc.evaluate.evaluation import Diverged, Evaluation, Forward
from partial_fc.train.guards.policy import NonFinite, roll_back
from partial_fc.train.guards.signals import EXIT_PREEMPTED, StepVote, StopSignals
from partial_fc.train.job import Job, Outcome
from partial_fc.train.record import first_batch
from partial_fc.train.record.curve import Curve
from partial_fc.train.record.progress import Progress
from partial_fc.train.update import Stopwatch, update


def train(job: Job) -> Outcome:
    """Trains to the schedule's end, evaluates, and writes the last checkpoint; ends early after a signal."""
    unit = job.backbone.to_input.unit
    progress = Progress(job.models_root, job.world, job.line, job.at.step, job.at.position, job.wandb, unit)
    curve = Curve(job.models_root, job.world, job.at.step)
    with (
        StopSignals(job.world.rank, partial(checkpoint.newest, job.saver.root)) as signals,
        closing(curve),
        closing(progress),
    ):
        return _Training(job, signals, progress, curve).run()


class _Training:
    """A job under way: what a step leaves to the next ones."""

    def __init__(self, job: Job, signals: StopSignals, progress: Progress, curve: Curve):
        self.job, self.signals, self.progress, self.curve = job, signals, progress, curve
        self.watch, self.vote = Stopwatch(job.world, job.backbone.device), StepVote(job.world)
        self.first_step, self.total_steps = job.at.step, job.schedule.total_steps
        self.loss = math.nan
        self.stopped = 0  # the exit status, once a rank has been asked to stop
        self.saved = self.first_step if self.first_step == self.total_steps else -1  # the step of the last checkpoint
        self.evaluated, self.evaluations = -1, dict[str, float]()  # the last step that was evaluated, and its values

    def run(self) -> Outcome:
        job, at, freeze_steps = self.job, self.job.at, self.job.settings.freeze_steps
        if job.backbone.scaler or job.guards.on_nan == "skip":
            job.backbone.keep_statistics()
        job.guards.last_equal = at.step
        job.hooks.begin(at)
        job.backbone.train()
        if at.step < freeze_steps:
            job.logger.info(f"the backbone is frozen up to step {freeze_steps}: only class centres move")
        while at.step < self.total_steps and not self.stopped:
            self.step()
        return self.end()

    def step(self) -> None:
        job, at, watch, settings = self.job, self.job.at, self.watch, self.job.settings
        # Random numbers of other people's modules depend on (seed, step, rank), so that resuming is exact; those of the
        # networks here on (seed, position of the sample), so that the number of ranks changes nothing, either.
        torch.manual_seed(counter_rng.derive_key(job.seed, at.step, job.world.rank))
        job.world.step = at.step + 1
        lr = job.schedule.lr(at.step)
        watch.restart()

        # ---- data: the micro-batches of this update
        batches = job.loader.next_update(settings.accumulate)
        is_last = job.loader.gone is not None and at.step + 1 < self.total_steps
        if is_last:
            job.logger.error(f"the training data is unreachable, ending after this step: {job.loader.gone}")
        self.vote.start(self.signals.status or is_last * EXIT_PREEMPTED, job.saver)
        report = self.progress.due(at.step + 1, batches[-1].position)
        watch.tell_apart(exact=report)
        watch.lap("data")

        # ---- forward, backward, update
        job.backbone.freeze(at.step < settings.freeze_steps)
        try:
            self.loss = update(job, batches, lr, watch)
        except NonFinite as fault:
            self.go_back(fault, batches[-1].position)
            return
        at.step, at.lr, at.position = at.step + 1, lr, batches[-1].position

        # ---- the decisions of all ranks on this step
        votes = self.vote.result()
        self.signals.all_listen = True
        restarts.step_done(at.step)
        job.saver.poll(votes.busy, votes.failed)
        if votes.lost:
            raise save_beside(job)
        self.stopped = votes.stop

        # ---- log, evaluate, save
        self.curve.add(at.step, self.loss, lr)
        self.progress.advance(self.loss)
        if at.step == self.first_step + 1:
            first_batch.write(job, batches[0])
        if report:
            scale = job.backbone.scaler.scale if job.backbone.scaler else None
            of_it = job.teacher.drain() if job.teacher else None
            epoch, shares = batches[-1].epoch, watch.drain_shares()
            self.progress.report(at.step, at.position, epoch, self.loss, lr, shares, scale, of_it)
        if is_due(at.step, job.guards.desync_every):
            compare_replicas(job)
        paused = time.perf_counter()
        self.save_and_evaluate(batches[-1].ends_epoch)
        self.progress.pause(time.perf_counter() - paused)

    def go_back(self, fault: NonFinite, position: int) -> None:
        """Rolls back, with --on-nan rollback, from the batch that ends at this position. A collective."""
        self.vote.result()
        self.job.saver.finish()  # a checkpoint under way is of an earlier step, and counts in any case
        roll_back(self.job, fault, position)
        self.curve.rewind(self.job.at.step)
        self.progress.rewind(self.job.at.step, self.job.at.position)

    def save_and_evaluate(self, ends: bool) -> None:
        """Does what is due after this step. ends: whether an epoch ends with it. A collective."""
        job, step, settings = self.job, self.job.at.step, self.job.settings
        ends_epoch, is_last = settings.each_epoch and ends, step == self.total_steps
        if is_due(step, settings.checkpoint_every) or ends_epoch or self.stopped or is_last:
            save(job)
            self.saved = step
        if (is_due(step, settings.evaluate_every) or ends_epoch) and not self.stopped:
            self.evaluations, self.saved = evaluate(job, self.progress, self.saved, ends or is_last)
            self.evaluated = step

    def end(self) -> Outcome:
        job, steps = self.job, max(1, self.job.at.step - self.first_step)
        if not self.stopped and self.evaluated != self.total_steps:
            self.evaluations, _ = evaluate(job, self.progress, self.saved, ends=True)
        job.saver.finish()
        if job.saver.any_lost():
            raise save_beside(job)
        return Outcome(
            loss=self.loss,
            samples_per_s=self.progress.samples_per_s,
            evaluations=self.evaluations,
            stopped=self.stopped,
            saved=not job.saver.last_failed,
            traffic=job.world.traffic.per_step(steps),
        )


def is_due(step: int, every: int) -> bool:
    """Returns whether an action every so many steps (0: never) is due after this step."""
    return every > 0 and step % every == 0


def evaluate(job: Job, progress: Progress, saved: int, ends: bool) -> tuple[dict[str, float], int]:
    """Runs all evaluations, once a checkpoint of this step is complete: whatever they do costs no trained step. Adds
    the scores to that checkpoint, or saves one if they are the best. saved: the step of the last checkpoint. ends:
    whether an epoch or the run ends here. Returns (values of those that did not fail; saved). A collective."""
    if saved == job.at.step:
        job.saver.finish()
    values: dict[str, float] = {}
    scores: dict[str, float] = {}
    at, failures = job.at, len(job.problems)
    with job.backbone.evaluating() as forward:
        for evaluation in job.evaluations:
            results, problem = all_or_none(partial(measure, job, evaluation, forward), job.world, "train/contained")
            if problem and problem not in job.problems and job.world.rank == 0:
                job.logger.error(f"step {at.step}: an evaluation failed, training goes on: {problem}")
            job.problems += [problem] if problem else []
            if isinstance(results, Diverged):
                raise results
            measured, found = results or ({}, {})
            progress.scalars(at.step, {f"{evaluation.board}{name}": value for name, value in measured.items()})
            values.update(measured)
            scores.update(found)
            if job.world.rank == 0 and measured:
                spare(f"the picture of {type(evaluation).__name__}", evaluation.draw, job.models_root)
        if ends:
            job.hooks.after_epoch(at, values)
    if scores:
        progress.scalars(at.step, {f"score/{name}": score for name, score in scores.items()})
    if not scores or len(job.problems) > failures:  # a mean over some of the sets is no score
        return values, saved
    score, before = sum(scores.values()) / len(scores), at.best_score
    at.best_score = max(score, before)
    if saved == at.step:
        job.saver.add_score(at.step, {"score": score, "best": at.best, "best_score": at.best_score})
    elif score > before and job.settings.save_best:
        save(job, score)
        saved = at.step
    return values, saved


def measure(job: Job, evaluation: Evaluation, forward: Forward) -> tuple[dict[str, float], dict[str, float]] | Diverged:
    """Runs one evaluation. Returns (values, scores by set), or what is to end the training. A collective."""
    at, epoch = job.at, job.at.position / job.loader.order.num_samples
    try:
        measured = dict(evaluation.run(forward, job.world))
    except Diverged as error:
        return error
    scores = evaluation.scores(measured)
    best = at.best | {name: max(score, at.best.get(name, 0.0)) for name, score in scores.items()}
    for line in evaluation.lines(at.step, epoch, measured, best):
        job.logger.info(line)
    at.best = best
    return measured, dict(scores)


def save(job: Job, score: float | None = None) -> None:
    """Captures the state of the next step and begins to write it, if checkpoints are kept. score: after this step."""
    if not job.settings.keep:
        return
    began = time.perf_counter()
    if job.saver.under_way:
        job.saver.finish()
        slow = is_due(job.at.step, job.settings.checkpoint_every)
        job.logger.info(
            f"step {job.at.step}: waited {time.perf_counter() - began:.2f} s for the checkpoint before to be written"
            f"{'; the disk is slower than --checkpoint-every asks for' if slow else ''}"
        )
    try:
        taken = snapshot(job, score, copy=job.saver.can_copy, behind=True)
    except (MemoryError, OSError) as error:
        job.saver.abort(job.at.step, error)
    else:
        job.saver.begin(taken, began)
        job.hooks.after_checkpoint(taken)


def save_beside(job: Job) -> LostLock:
    """Writes the state beside a folder that another run has taken, and returns the error to end with. A collective."""
    job.saver.finish()
    why = job.saver.lost or LostLock(f"{job.saver.root} no longer belongs to this run, as another rank has found")
    if not job.settings.keep:
        return why
    root = job.models_root.with_name(f"{job.models_root.name}.lost-{job.name}")
    try:
        with closing(checkpoint.Saver(root / "checkpoints", job.world, keep=1)) as saver:
            saver.begin(snapshot(job, copy=False))
            saver.finish()
    except ValueError as error:
        return LostLock(f"{why}. The state of step {job.at.step} could not be saved elsewhere: {error}")
    if saver.last_failed:
        return LostLock(f"{why}. The state of step {job.at.step} could not be saved in {root} either, see above")
    return LostLock(
        f"{why}. The state of step {job.at.step} is in {root}: resume from it with --models-root NEW --resume "
        f"{saver.root / folder_name(job.at.step)}"
    )


def snapshot(job: Job, score: float | None = None, **how: Any) -> checkpoint.Snapshot:
    """Captures the next step's state. how: see `checkpoint.capture`. Raises MemoryError, on this rank. A collective."""
    at, scaler = job.at, job.backbone.scaler
    facts = {
        "position": at.position,
        "left_out": list(at.left_out),  # written during training, with the changes made since
        "num_overflows": at.num_overflows,
        "best": dict(at.best),
        "best_score": at.best_score,
        "score": score,
        **job.facts,
    }
    if scaler:
        facts["loss_scaler"] = scaler.state()
    return checkpoint.capture(
        at.step, *job.backbone.state(), job.head, facts, world=job.world, class_names=job.class_names, **how
    )


def compare_replicas(job: Job) -> None:
    """Raises ValueError, on all ranks alike, if the backbones have diverged, with the ranks that differ, and the first
    difference. A collective (consistency.compare_replicas).

    A faulty GPU or memory, a library that adds in another order on one host, or a lost message need not show in the
    loss, but from then on the ranks train different models.
    """
    scaler, step = job.backbone.scaler, job.at.step
    facts = {"loss scale": scaler.state() if scaler else 1.0}
    for table in job.head.tables().values():
        of = f"table {table.name}'s" if table.name else "the head's"
        facts |= {f"{of} {name}": fact for name, fact in table.facts().items() if name in ("num_steps", "margin")}
    facts |= {f"the head's {name}": fact for name, fact in job.head.state().items()}
    found = consistency.compare_replicas({**facts, **job.backbone.replicated()}, job.world, "train/replicas")
    if found:
        last = job.guards.last_equal
        raise ValueError(
            f"step {step}: the replicas have diverged: {found}. The ranks have been training different models since "
            f"some step after {last}, when they were equal: resume from a checkpoint of step {last} or before "
            "(--resume DIR). Usual causes: a faulty GPU or memory (look at its ECC counters, run without that "
            "host), hosts with different processors or versions of libraries. (--desync-every 0 turns this check off)"
        )
    job.guards.last_equal = step
