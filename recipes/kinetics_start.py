"""Start of a run of recipe kinetics: GluonCV's files, the first epoch, and the epochs of learning-rate decay."""

from dataclasses import replace

from partial_fc.checkpoint.consistency import check_replicas
from partial_fc.data.order import Order
from partial_fc.flags import ScheduleFlags
from partial_fc.foreign import gluoncv
from partial_fc.optim.backbone import load_named_state
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.run import Run
from partial_fc.train.seams import RunState


def load_params(run: Run, backbone: TorchBackbone) -> None:
    """Loads weights and running statistics of a .params file, momentum of a .states file. A collective."""
    model, module = run.config.model, backbone.module
    gluoncv.load(module, model.resume_params)
    state, message = dict(module.state_dict()), f"started from {model.resume_params}"
    if model.resume_states and not model.eval:
        found = gluoncv.read_states(module, model.resume_states)
        state |= found.masters
        named = dict(backbone.weights.named_parameters())
        momentum = {f"{name}/momentum": t.to(named[name].dtype) for name, t in found.momentum.items()}
        load_named_state(backbone.optimizer, backbone.weights, momentum)
        message += f", with the momentum of {model.resume_states} after {found.num_updates:,} updates"
    backbone.weights.load_state_dict(state)
    check_replicas(backbone.replicated(), run.world)
    run.logger.info(message)


def start_from(run: Run, backbone: TorchBackbone, order: Order, state: RunState) -> None:
    """Sets the start of a run that does not resume. A collective."""
    model = run.config.model
    if model.resume_params and not state.step:
        load_params(run, backbone)
    if model.resume_epoch and state.step:
        run.note(f"--resume-epoch {model.resume_epoch} is for a new run; this one resumes from its own checkpoint")
    elif model.resume_epoch:
        state.position = model.resume_epoch * order.num_samples
        state.step = state.position // run.global_batch


def decay_steps(run: Run, order: Order) -> ScheduleFlags:
    """Returns the schedule with its decay epochs converted to updates."""
    schedule, model = run.config.schedule, run.config.model
    if schedule.lr_scheduler != "step" or schedule.lr_steps or schedule.lr_step_epochs:
        return schedule
    per_epoch = order.num_samples / run.global_batch
    total = order.updates_to(0, schedule.epochs * order.num_samples, run.global_batch)
    steps = (round(epoch * per_epoch) for epoch in model.decay_epochs(schedule.epochs))
    within = tuple(sorted({step for step in steps if 0 < step < (schedule.max_steps or total)}))
    if within:
        return replace(schedule, lr_steps=within)
    run.note(f"--lr-mode step: the run ends before the rate falls (--lr-decay-epoch {model.lr_decay_epoch})")
    return replace(schedule, lr_scheduler="constant", lr_factor=0.1)
