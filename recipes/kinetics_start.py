"""Where a run of recipe kinetics starts: from a .params file, at an epoch; and where its learning rate falls."""

from dataclasses import replace
from typing import Any

from partial_fc.checkpoint.consistency import check_replicas
from partial_fc.data.order import Order
from partial_fc.foreign import gluoncv
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.job import RunState
from partial_fc.train.run import Run


def load_params(run: Run, backbone: TorchBackbone) -> None:
    """Weights and running statistics of a .params file. A collective."""
    path = run.config.model.resume_params
    gluoncv.load(backbone.module, path)
    backbone.weights.load_state_dict(backbone.module.state_dict())
    check_replicas(backbone.replicated(), run.world)
    run.logger.info(f"started from {path}")


def resume_epoch(run: Run, order: Order, start: RunState) -> None:
    epoch = run.config.model.resume_epoch
    if not epoch:
        return
    if start.step:
        run.note(f"--resume-epoch {epoch} is for a new run; this one goes on from its own checkpoint")
        return
    start.position = epoch * order.num_samples
    start.step = start.position // run.global_batch


def with_decay_steps(run: Run, order: Order) -> Any:
    """The configuration with the epochs at which the rate falls as updates."""
    schedule, model = run.config.schedule, run.config.model
    if schedule.lr_scheduler != "step" or schedule.lr_steps or schedule.lr_step_epochs:
        return run.config
    per_epoch = order.num_samples / run.global_batch
    total = order.updates_to(0, schedule.epochs * order.num_samples, run.global_batch)
    steps = (round(epoch * per_epoch) for epoch in model.decay_epochs(schedule.epochs))
    within = tuple(sorted({step for step in steps if 0 < step < (schedule.max_steps or total)}))
    if within:
        return replace(run.config, schedule=replace(schedule, lr_steps=within))
    run.note(f"--lr-mode step: the run ends before the rate falls (--lr-decay-epoch {model.lr_decay_epoch})")
    return replace(run.config, schedule=replace(schedule, lr_scheduler="constant", lr_factor=0.1))
