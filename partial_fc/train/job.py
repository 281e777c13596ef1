"""A training job: the parts that a recipe puts together, and what comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any, Literal

from partial_fc.checkpoint import Saver
from partial_fc.comm import World
from partial_fc.data import Loader
from partial_fc.evaluate import Evaluation
from partial_fc.head import Head
from partial_fc.optim.gradient_sync import StepBytes
from partial_fc.optim.schedule import Continued, Schedule
from partial_fc.train.guards.commits import Commits
from partial_fc.train.record.boards import Wandb
from partial_fc.train.record.log import StepLine
from partial_fc.train.seams import Backbone, Hooks, RunState


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Numbers of the loop. Intervals are in steps; 0: never."""

    accumulate: int = 1  # micro-batches of one update
    clip: float = 0.0  # largest norm of the whole gradient (with head_clip of the backbone's); 0: any
    head_clip: float = 0.0  # largest norm of the class centres' gradient; 0: see clip
    head_lr_ratio: float = 1.0  # learning rate of the class centres over the schedule's
    evaluate_every: int = 0  # besides the end
    checkpoint_every: int = 0  # besides the end
    each_epoch: bool = False  # evaluate and save where an epoch ends, too
    keep: bool = True  # checkpoints are written
    save_best: bool = False  # save when an evaluation was the best so far, too
    telemetry_every: int = 0  # looks at the head's rows


@dataclass
class Guards:
    """What a run does if its numbers are not finite or its replicas part: what was asked for, and what came of it.
    Equal on all ranks. Intervals are in steps; 0: never."""

    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    max_skips: int = 10  # updates left out in a row
    max_rollbacks: int = 3
    desync_every: int = 500
    # Brings the state of the last complete checkpoint back; returns its step and position in the data, none where there
    # is no checkpoint. A collective.
    restore: Callable[[], tuple[int, int] | None] | None = None
    # Where it stands.
    num_skips: int = 0  # in a row
    num_rollbacks: int = 0
    last_equal: int = 0  # the step of the last look at the replicas


@dataclass
class Job:
    """What `train` uses up."""

    world: World
    loader: Loader
    backbone: Backbone
    head: Head
    schedule: Schedule | Continued
    evaluations: Sequence[Evaluation]
    settings: Settings
    guards: Guards
    saver: Saver
    commits: Commits
    at: RunState
    line: StepLine
    models_root: Path
    logger: Logger
    seed: int
    facts: dict[str, Any]  # for checkpoints: recipe, network, configuration, versions
    hooks: Hooks = field(default_factory=Hooks)
    class_names: list[str] | None = None
    wandb: Wandb | None = None  # of rank 0, with --wandb


@dataclass(frozen=True)
class Outcome:
    """What comes out, equal on every rank. stopped: the exit status where a rank was asked to stop before the last
    step, else 0; saved: whether the state at the end is in a checkpoint; traffic: by collective of this rank, calls and
    bytes a step, evaluations included; exchanged: of this rank, the backbone's gradient, and what of it was handed
    in."""

    loss: float
    samples_per_s: float
    evaluations: dict[str, float]
    stopped: int
    saved: bool
    traffic: dict[str, dict[str, float]]
    exchanged: StepBytes
