"""A training job: the parts that a recipe builds, and the outcome."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any, Literal

from partial_fc.checkpoint import Saver
from partial_fc.comm import World
from partial_fc.data import Loader
from partial_fc.evaluate.evaluation import Evaluation
from partial_fc.head import Head
from partial_fc.optim.gradient_sync import StepBytes
from partial_fc.optim.schedule import Continued, Schedule
from partial_fc.train.record.boards import Wandb
from partial_fc.train.record.log import StepLine
from partial_fc.train.seams import Backbone, Hooks, RunState
from partial_fc.train.teacher import Teacher


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of the loop. Intervals are in steps; 0: never."""

    accumulate: int = 1  # micro-batches of one update
    accumulate_sum: bool = False  # the update's gradient is the sum of theirs, not the mean over all samples
    clip: float = 0.0  # largest norm of the whole gradient (with head_clip of the backbone's); 0: any
    head_clip: float = 0.0  # largest norm of the class centres' gradient; 0: see clip
    head_lr_ratio: float = 1.0  # learning rate of the class centres over the schedule's
    freeze_steps: int = 0  # first steps that leave the backbone as it is
    evaluate_every: int = 0  # besides the end
    checkpoint_every: int = 0  # besides the end
    each_epoch: bool = False  # evaluate and save where an epoch ends, too
    keep: bool = True  # checkpoints are written
    save_best: bool = False  # save when an evaluation was the best so far, too


@dataclass
class Guards:
    """The guards against NaN, Inf and diverged replicas: settings and counts, equal on all ranks. 0 steps: never."""

    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    desync_every: int = 500
    # Restores the last complete checkpoint; returns its step and position in the data, or None. A collective.
    restore: Callable[[], tuple[int, int] | None] | None = None
    # State.
    num_skips: int = 0  # consecutive
    num_rollbacks: int = 0
    last_equal: int = 0  # the step of the last check of the replicas


@dataclass
class Job:
    """The arguments of `train`."""

    world: World
    loader: Loader
    backbone: Backbone
    head: Head
    schedule: Schedule | Continued
    evaluations: Sequence[Evaluation]
    settings: Settings
    guards: Guards
    saver: Saver
    name: str  # of the run, in the records of its folders
    at: RunState
    line: StepLine
    models_root: Path
    logger: Logger
    seed: int
    facts: dict[str, Any]  # for checkpoints: recipe, network, configuration, versions
    hooks: Hooks = field(default_factory=Hooks)
    class_names: list[str] | None = None
    wandb: Wandb | None = None  # of rank 0, with --wandb
    teacher: Teacher | None = None  # adds its part to the loss
    problems: list[str] = field(default_factory=list)  # of evaluations, equal on all ranks


@dataclass(frozen=True)
class Outcome:
    """The outcome, equal on every rank. stopped: the exit status if a signal stopped it before the last step, else 0;
    saved: whether the final state is in a checkpoint; traffic: this rank's calls and bytes a step by collective, with
    evaluations; exchanged: this rank's backbone gradient, and the bytes sent of it."""

    loss: float
    samples_per_s: float
    evaluations: dict[str, float]
    stopped: int
    saved: bool
    traffic: dict[str, dict[str, float]]
    exchanged: StepBytes
