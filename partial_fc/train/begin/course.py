"""The course of a run's learning rate, from where it starts to its end, by its flags."""

from partial_fc import errors, flags
from partial_fc.data.order import Order
from partial_fc.optim.schedule import Continued, Schedule, continued, linear_scaling
from partial_fc.train.context import Context
from partial_fc.train.job import RunState
from partial_fc.train.resume import Start


def schedule(
    run: Context, start: Start, order: Order, unit: str, rates: flags.ScheduleFlags | None = None
) -> Schedule | Continued:
    """Returns the learning rate's schedule from the start of the run to its end. unit: the noun for samples. rates:
    instead of the flags' schedule. Raises ValueError if the run starts beyond its end."""
    course = _course(run, order, unit, rates or run.config.schedule)
    schedule = _from(run, start.state, order, unit, course)
    given = vars(run.config.schedule)
    changed = {name: value for name, value in start.length_before.items() if value != given[name]}
    if changed and start.state.step < schedule.total_steps:  # the rate of a step may depend on the end of the run
        words = [f"{flags.flag(name)} {value} before, {given[name]} now" for name, value in changed.items()]
        run.note(f"{'; '.join(words)}: the next step's learning rate is {schedule.lr(start.state.step):g}")
    return schedule


def lengths(run: Context, order: Order) -> tuple[int, float]:
    """Returns (updates of the run, updates of its warm-up). Raises ValueError if the warm-up is longer."""
    given, steps_per_epoch = run.config.schedule, order.num_samples / run.global_batch
    if given.lr_scheduler == "arcface-torch":
        total = given.max_steps or int(_whole_batches(run, order, given.epochs))
        warmup = given.warmup_steps + _whole_batches(run, order, given.warmup_epochs)
    else:
        total = given.max_steps or order.updates_to(0, given.epochs * order.num_samples, run.global_batch)
        warmup = given.warmup_steps + round(given.warmup_epochs * steps_per_epoch)
    if total == 0 and given.lr_scheduler == "arcface-torch":
        raise ValueError(
            f"--lr-scheduler arcface-torch counts whole batches: {order.num_samples:,} samples make no update of "
            f"{run.global_batch:,} ({run.world.size} processes x --batch-size {run.config.optim.batch_size} x "
            f"--accumulate {run.config.optim.accumulate}); give a smaller --batch-size, or --lr-scheduler polynomial"
        )
    if 0 < total <= warmup:
        ends = f"--max-steps {given.max_steps}" if given.max_steps else f"--epochs {given.epochs:g}"
        raise ValueError(
            f"the warm-up takes {warmup} updates (--warmup-steps {given.warmup_steps}, --warmup-epochs "
            f"{given.warmup_epochs:g} of {steps_per_epoch:.1f} updates each), and the run ends after {total} "
            f"({ends}); for a short try give --warmup-steps 0 --warmup-epochs 0, or else train for longer"
        )
    return total, warmup


def _whole_batches(run: Context, order: Order, epochs: float) -> float:
    """Returns the updates of so many epochs by the whole batches of all processes, as arcface_torch counts."""
    accumulate = run.config.optim.accumulate
    return epochs * (order.num_samples // (run.global_batch // accumulate)) / accumulate


def _from(run: Context, start: RunState, order: Order, unit: str, course: Schedule) -> Schedule | Continued:
    """Returns the remaining part of a schedule."""
    seen = start.position - sum(end - begin for begin, end in start.left_out)
    # By how much the steps so far fall short of the updates of this batch size that would have seen as many samples.
    shift = order.updates_at(seen, run.global_batch) - start.step
    if run.config.schedule.max_steps or not shift:
        if start.step > course.total_steps:
            raise errors.RefusedByAll(
                f"the checkpoint to resume from is at step {start.step}, beyond this run's {course.total_steps}; "
                "use another --models-root, or more --epochs or --max-steps"
            )
        return course
    total = run.config.schedule.epochs * order.num_samples
    schedule = continued(course, start.step, order.updates_to(seen, total, run.global_batch), shift)
    left, like = schedule.total_steps - start.step, start.step + schedule.shift
    run.logger.info(
        f"{seen:,} of {total:,.0f} {unit} have been seen in {start.step} steps; with {run.global_batch} a step {left} "
        "more remain"
    )
    lr = schedule.lr(start.step)
    run.logger.info(f"learning rate {lr:g}, as in step {like:.1f} of {course.total_steps} of this size")
    return schedule


def _course(run: Context, order: Order, unit: str, given: flags.ScheduleFlags) -> Schedule:
    steps_per_epoch = order.num_samples / run.global_batch
    total, warmup_steps = lengths(run, order)
    micro_batches = f" x {run.config.optim.accumulate}" if run.config.optim.accumulate > 1 else ""
    run.logger.info(
        f"{order.num_samples:,} {unit}; global batch {run.world.size} x {run.config.optim.batch_size}"
        f"{micro_batches} = {run.global_batch}; {steps_per_epoch:.1f} steps an epoch, {total} steps in all"
    )
    lr = given.lr
    if given.lr_scaling == "linear":
        lr, arithmetic = linear_scaling(given.lr, given.base_batch_size, run.global_batch)
        run.logger.info(arithmetic)
    if given.lr_scheduler == "step" and given.lr_steps and run.global_batch != given.base_batch_size:
        run.note(
            f"--lr-steps and --max-steps are updates of {run.global_batch} {unit} here, of {given.base_batch_size} in "
            "the preset"
        )
    return Schedule(
        kind=given.lr_scheduler,
        base_lr=lr,
        total_steps=total,
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
