"""A training job: the parts that a recipe builds, its state, and the outcome."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any, Literal

from partial_fc.checkpoint import Saver, Snapshot
from partial_fc.comm import World
from partial_fc.data import Loader
from partial_fc.evaluate.evaluation import Evaluation
from partial_fc.head import Head
from partial_fc.optim.schedule import Continued, Schedule
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.record.boards import Wandb
from partial_fc.train.record.log import StepLine
from partial_fc.train.teacher import Teacher


@dataclass
class RunState:
    """The state of a run. Equal on all ranks."""

    step: int = 0
    position: int = 0  # in the data: samples consumed by all ranks
    num_overflows: int = 0  # skipped updates, for a loss scale that was too large
    left_out: list[tuple[int, int]] = field(default_factory=list)  # positions [from, to) skipped by rollbacks
    best: dict[str, float] = field(default_factory=dict)  # the highest score of each evaluated set
    best_score: float = 0.0  # the highest mean score
    lr: float = 0.0  # the learning rate of this process's last update
    data: dict[str, int] | None = None  # what the position counts in, of the checkpoint (data.sample.identity)


class Hooks:
    """Hooks of a recipe, for files of other programs; called on all ranks; they do nothing by default."""

    def begin(self, state: RunState) -> None:
        """Called when training starts or resumes from this state."""

    def after_checkpoint(self, snapshot: Snapshot) -> None:
        """Called when a checkpoint of this rank's state is being written."""

    def after_epoch(self, state: RunState, values: Mapping[str, float]) -> None:
        """Called at the end of an epoch, or the run, with the values of its evaluations. The model still has the
        running statistics of all ranks together."""


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
    backbone: TorchBackbone
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
    saved: whether the final state is in a checkpoint; traffic: this rank's calls and bytes a step by collective."""

    loss: float
    samples_per_s: float
    evaluations: dict[str, float]
    stopped: int
    saved: bool
    traffic: dict[str, dict[str, float]]
