"""A training job: what a recipe puts together, and what comes out."""

from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partial_fc.checkpoint import Saver
from partial_fc.comm import World
from partial_fc.data import Loader
from partial_fc.evaluate import Verification
from partial_fc.head import PartialFC
from partial_fc.optim.gradient_sync import GradientSync, StepBytes
from partial_fc.optim.schedule import Continued, Schedule
from partial_fc.train.commits import Commits
from partial_fc.train.guards import Guards
from partial_fc.train.precision import Precision, Weights

EXIT_PREEMPTED = 75  # asked to stop, and saved: start it again (EX_TEMPFAIL of sysexits.h)


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
    schedule: Schedule | Continued
    precision: Precision
    weights: Weights  # of the backbone, as the optimiser has them
    accumulate: int  # micro-batches of one update
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
    saver: Saver
    checkpoint_every: int  # steps; 0: only at the end
    save_best: bool  # also when an evaluation was the best so far
    commits: Commits
    class_names: list[str] | None
    facts: dict[str, Any]  # for checkpoints: configuration, versions
    guards: Guards = field(default_factory=Guards)
    # where it stands
    step: int = 0
    position: int = 0  # in the data: samples consumed by all ranks
    left_out: list[tuple[int, int]] = field(default_factory=list)  # positions [from, to): what rollbacks went round
    best: dict[str, float] = field(default_factory=dict)  # accuracy by verification set
    best_score: float = 0.0  # mean accuracy over all of them


@dataclass
class Outcome:
    """Of a finished run, equal on every rank."""

    loss: float
    images_per_s: float
    evaluations: dict[str, float]
    stopped: bool  # before the last step, because a rank was asked to
    saved: bool  # whether the state at the end is in a checkpoint
    traffic: dict[str, dict[str, float]]  # of this rank, by collective: calls and bytes a step, evaluations included
    exchanged: StepBytes  # of this rank: the backbone's gradient, and what of it was handed in
