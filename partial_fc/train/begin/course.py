"""The course of a run's learning rate, from where it starts to its end, by its flags."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from partial_fc import errors, flags
from partial_fc.data.order import Order
from partial_fc.head import PartialFC, Steps
from partial_fc.optim.schedule import Continued, Schedule, continued, linear_scaling
from partial_fc.train.head_from_flags import margin_and_rate
from partial_fc.train.seams import RunState

if TYPE_CHECKING:
    from partial_fc.train.run import Run


def schedule(run: Run, start: RunState, order: Order, rates: flags.ScheduleFlags | None = None) -> Schedule | Continued:
    """Returns the learning rate's schedule from the start of the run to its end. rates: instead of the flags'
    schedule. Raises ValueError if the run starts beyond its end."""
    course = _course(run, order, rates or run.config.schedule)
    schedule = _from(run, start, order, course)
    if start.step < schedule.total_steps:
        _note_other_length(run, course, schedule, start.step, order)
    return schedule


def _other_length(run: Run) -> str:
    """Returns how the length of the run differs from that of the one that it resumes; "" where it does not."""
    given = vars(run.config.schedule)
    changed = {name: value for name, value in run.length_before.items() if value != given[name]}
    return "; with ".join(f"{flags.flag(name)} {value}, this run has {given[name]}" for name, value in changed.items())


def _note_other_length(run: Run, course: Schedule, schedule: Schedule | Continued, step: int, order: Order) -> None:
    """Notes that the rate of a step may depend on a changed end of the run."""
    words = _other_length(run)
    if not words:
        return
    now = schedule.lr(step)
    rate = f"the learning rate of the next step is {now:g}"
    total = run.total_steps(order, **run.length_before)
    if total > course.warmup_steps:  # else another flag's note covers the warm-up
        was = dataclasses.replace(course, total_steps=total)
        like = step + (schedule.shift if isinstance(schedule, Continued) else 0)
        then = was.lr(min(like, total))
        if then == now:  # the schedule does not depend on the end
            return
        rate += f", and was to be {then:g}"
    run.note(f"the checkpoint was trained with {words}: allowed, but {rate}")


def schedule_heads(run: Run, start: RunState, order: Order) -> None:
    """Gives each head the course of its margin and sample rate by its flags: percentages are of the samples, as those
    of the learning rate's course, so they come at other steps where a run goes on with another batch size. Notes where
    the end of the run has changed them."""
    for given, head in run.scheduled:
        if given.margin_by_step or given.rate_by_step:
            _schedule_head(run, start, order, given, head)


def _schedule_head(run: Run, start: RunState, order: Order, given: flags.HeadFlags, head: PartialFC) -> None:
    (total, _), now = run.lengths(order), head.num_steps
    shift = 0.0 if run.config.schedule.max_steps else _shift(run, start, order)
    head.set_schedule(*margin_and_rate(given, total, shift))
    words = _other_length(run)
    for by_step in (given.margin_by_step, given.rate_by_step):
        if by_step is None:
            continue
        steps = by_step.steps(total, shift)
        run.logger.info(by_step.in_words(steps))
        if words and any(entry.is_percent for entry in by_step.entries):
            before = by_step.steps(run.total_steps(order, **run.length_before), shift)
            values = [Steps(each).at(now) for each in (steps, before)]
            if values[0] != values[1]:
                run.note(
                    f"the checkpoint was trained with {words}: allowed, but {by_step.as_typed} is {values[0]:g} in the "
                    f"next step, and was to be {values[1]:g}"
                )


def _shift(run: Run, start: RunState, order: Order) -> float:
    """Returns by how much the steps so far fall short of the updates of this batch size that would have seen as many
    samples."""
    seen = start.position - sum(end - begin for begin, end in start.left_out)
    return order.updates_at(seen, run.global_batch) - start.step


def _from(run: Run, start: RunState, order: Order, course: Schedule) -> Schedule | Continued:
    """Returns the remaining part of a schedule."""
    shift = _shift(run, start, order)
    if run.config.schedule.max_steps or not shift:
        if start.step > course.total_steps:
            raise errors.RefusedByAll(
                f"the checkpoint to resume from is at step {start.step}, beyond this run's {course.total_steps}; "
                "use another --models-root, or more --epochs or --max-steps"
            )
        return course
    seen = start.position - sum(end - begin for begin, end in start.left_out)
    total = run.config.schedule.epochs * order.num_samples
    schedule = continued(course, start.step, order.updates_to(seen, total, run.global_batch), shift)
    left, like = schedule.total_steps - start.step, start.step + schedule.shift
    run.logger.info(
        f"{seen:,} of {total:,.0f} {run.unit} have been seen in {start.step} steps; with {run.global_batch} a "
        f"step {left} more steps remain, {schedule.total_steps} in all; learning rate {schedule.lr(start.step):g}, "
        f"as in step {like:.1f} of {course.total_steps} of this size"
    )
    return schedule


def _course(run: Run, order: Order, given: flags.ScheduleFlags) -> Schedule:
    steps_per_epoch = order.num_samples / run.global_batch
    total_steps, warmup_steps = run.lengths(order)
    micro_batches = f" x {run.config.optim.accumulate}" if run.config.optim.accumulate > 1 else ""
    run.logger.info(
        f"{order.num_samples:,} {run.unit}; global batch {run.world.size} x {run.config.optim.batch_size}"
        f"{micro_batches} = {run.global_batch}; {steps_per_epoch:.1f} steps an epoch, {total_steps} steps in all"
    )
    lr = given.lr
    if given.lr_scaling == "linear":
        lr, arithmetic = linear_scaling(given.lr, given.base_batch_size, run.global_batch)
        run.logger.info(arithmetic)
    if given.lr_scheduler == "step" and given.lr_steps and run.global_batch != given.base_batch_size:
        run.note(
            "--lr-steps and --max-steps count updates and are not scaled: this run's updates see "
            f"{run.global_batch} {run.unit}, those of the preset {given.base_batch_size}"
        )
    return Schedule(
        kind=given.lr_scheduler,
        base_lr=lr,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        warmup_start=given.warmup_lr if given.warmup_steps or given.warmup_epochs else 0.0,
        micro_batches=run.config.optim.accumulate,
        decay_steps=given.lr_steps if given.lr_scheduler == "step" else (),
        decay_every=max(1, int(given.lr_step_epochs * steps_per_epoch))
        if given.lr_step_epochs and given.lr_scheduler == "step"
        else 0,
        factor=given.lr_factor,
        power=given.lr_power,
    )
