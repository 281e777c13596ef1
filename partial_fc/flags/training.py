"""The flags that every recipe has, by group: one field is one flag with one help text.

A recipe's Config holds the groups with its own defaults:

    run: Flags[RunFlags] = RunFlags(models_root=Path("runs/mnist-DATA-NETWORK"))

where Flags leaves the group's name out of the flags' names.
"""

import copy
import dataclasses
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from partial_fc.flags.facts import BATCH, Basic, Counts, In, MayChange, Refused, check_numbers, flag, may_change

NO_CHECKPOINT = ("auto", "same", "never")
"""What --resume may be, besides the folder of a checkpoint."""


@may_change
@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Where a run is written, when it is saved, and what it resumes from."""

    models_root: Annotated[Path, Basic]
    """Where everything is written: model, checkpoints, logs, TensorBoard, loss.csv, result.json, pictures; by one run
    at a time. In the default DATA is the name of the data set (of --dataset, --config, or the data's path), NETWORK
    that of the network: runs/face-faces-r50."""
    resume: Annotated[str, Basic] = "auto"
    """auto: resume from the newest intact checkpoint of --checkpoint-dir, if there is one; damaged ones are renamed.
    same: like auto, but only if it was trained with the same flags. never: start from step 0. DIR: resume from this
    checkpoint; if it is an older one of this run, the newer ones are renamed. Flags that differ from the checkpoint's
    are logged or refused."""
    loader: Literal["auto", "threads", "process"] = "auto"
    """Where the --num-workers threads of each rank decode. threads: in the training's process. process: in one beside
    it, where they do not hold up the thread that launches the GPU's kernels. auto: process with a GPU, else threads."""
    frequent: Annotated[int, In(1)] = 20
    """Steps between two lines of the log. (The first ones come after 1, 2, 5 and 10 steps.)"""
    wandb: str | None = None
    """PROJECT: the numbers that TensorBoard gets also go to this project of Weights & Biases, if its library is
    installed (pip install wandb); WANDB_MODE=offline keeps them below --models-root for `wandb sync`."""
    verbose: int = 2000
    """Steps between two evaluations; 0: none but those that the recipe makes anyway, and the one at the end."""
    checkpoint_dir: Path | None = None
    """Where checkpoints are written: a folder that all hosts see, or one of its own on each. none: checkpoints in
    --models-root."""
    checkpoint_every: int = 2000
    """Steps between two checkpoints, which are written while training continues; 0: only those that the recipe writes
    anyway, and the last one. (With synthetic data none is written unless --models-root, --checkpoint-dir or
    --checkpoint-every is given.)"""
    keep_checkpoints: Annotated[int, In(1)] = 3
    """Older ones are removed."""
    save_best: bool = True
    """A checkpoint also whenever an evaluation was the best so far (mean accuracy of all sets); the best one is kept
    besides --keep-checkpoints."""
    seed: Annotated[int, Counts] = 0
    """Seed of all random numbers: equal seeds give equal runs, for any number of ranks."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.wandb is not None and importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"--wandb {self.wandb} needs the package wandb, which is not installed: `pip install wandb`, or leave "
                "--wandb out"
            )

    @property
    def checkpoints(self) -> Path:
        """The folder that they are in."""
        return self.checkpoint_dir or self.models_root / "checkpoints"


@may_change
@dataclass(frozen=True, kw_only=True)
class GuardFlags:
    """What happens after NaN or Inf, and how often replicas are compared."""

    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """After NaN or Inf in the loss or a gradient; the first such tensor is named, and the batch is written below
    --models-root. stop: the run ends; the last checkpoint remains. skip: no rank makes the update, and the run
    continues, unless ten in a row had to be skipped; class centres then wait for the backbone's gradient in
    every step. rollback: the run returns to the last checkpoint, and continues with the data after the bad batch, three
    times at most."""
    desync_every: int = 500
    """Steps between two checks that the backbone and its optimizer are the same bits on all ranks; 0: never."""


@dataclass(frozen=True, kw_only=True)
class ExchangeFlags:
    """How the backbone's gradient is sent between ranks."""

    gradient_compression: Literal["none", "fp16", "bf16"] = "none"
    """For slow links: half the bytes."""


@dataclass(frozen=True, kw_only=True)
class OptimFlags:
    """Batches, the backbone's optimizer, and the precision it computes in."""

    batch_size: Annotated[int, In(BATCH), Basic] = 64
    """Samples of one process in one forward pass; see --accumulate."""
    accumulate: Annotated[int, In(BATCH)] = 1
    """Micro-batches of --batch-size samples that make one update: what one batch of all of them would do (batch norm
    apart), in the memory of one. Steps, schedules and --max-steps count updates."""
    accumulate_sum: bool = False
    """The gradient of an update is the sum of its micro-batches' mean gradients, as in arcface_torch, not their mean:
    SGD moves --accumulate times as far, and --clip cuts the sum."""
    optimizer: Annotated[Literal["sgd", "adamw", "muon"], Basic, Refused("its state is of no use to another one")] = (
        "sgd"
    )
    """What moves the backbone, and class centres where they have no other. muon: Muon for convolutions and matrices,
    AdamW for the rest and for centres, at AdamW's learning rate and decay."""
    momentum: Annotated[float, In("[0, 1)")] = 0.9
    """For sgd."""
    weight_decay: float = 5e-4
    """Decay of all parameters."""
    clip: float = 0.0
    """Largest norm of the whole gradient, over backbone and all shards of class centres; 0: any."""
    sync_bn: bool = False
    """Batch-norm statistics over all ranks: W ranks then do what one process does with the whole batch."""
    precision: Annotated[Literal["auto", "bf16", "fp16", "fp16-o2", "fp32", "fp64"], Basic] = "auto"
    """bf16, fp16: the backbone computes in 16 bits where that is safe (autocast, O1); fp16 with a loss scale.
    fp16-o2: its weights are float16, too, with fp32 masters (O2). auto: bf16 where the hardware has it, else
    fp32. A head with class centres multiplies bfloat16 numbers where the backbone computes in 16 bits and the hardware
    has them, and adds up in fp32. fp64: for checks, where rounding would hide whether two runs do the same."""


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags:
    """How long a run is, and the course of its learning rate."""

    lr: Annotated[float, Basic] = 0.1
    """Learning rate, for a global batch of --base-batch-size where --lr-scaling is linear."""
    lr_scaling: Literal["linear", "none"] = "linear"
    """linear: --lr times global batch / --base-batch-size; the arithmetic is printed."""
    base_batch_size: Annotated[int, In(1)] = 512
    """The global batch that --lr is meant for."""
    lr_scheduler: Literal["step", "polynomial", "cosine", "constant", "arcface-torch"] = "polynomial"
    """Course of the rate after the warm-up. arcface-torch: polynomial as there: the first update of a warm-up has the
    full rate, and epochs count whole batches."""
    lr_steps: Annotated[tuple[int, ...], In(1)] = ()
    """For `step`: the updates after which the rate falls (--lr-factor)."""
    lr_step_epochs: float = 0.0
    """For `step`, instead of --lr-steps: epochs between two falls of the rate."""
    lr_factor: Annotated[float, In("(0, 1)")] = 0.1
    """For `step`: what the rate is multiplied by."""
    lr_power: float = 1.0
    """For `polynomial` and `arcface-torch`."""
    warmup_steps: int = 0
    """Updates in which the rate rises from --warmup-lr."""
    warmup_epochs: float = 0.0
    """The same in epochs; added to --warmup-steps."""
    warmup_lr: float = 0.0
    """The rate of the first update of a warm-up. (Goyal et al. begin with --lr, before its scaling.)"""
    epochs: Annotated[float, In("(0, inf)"), Basic, MayChange] = 20.0
    """Passes over the data; may be a fraction."""
    max_steps: Annotated[int | None, In(1), Basic, MayChange] = None
    """Updates to train for, instead of --epochs."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.lr_steps and self.lr_step_epochs:
            raise ValueError("--lr-steps and --lr-step-epochs both say where the rate falls; give one of them")


def notes(config: Any, world_size: int) -> Iterator[str]:
    """Yields a note for each given flag of the shared groups that has no effect."""
    run, guards, kind = config.run, config.guards, config.exchange.gradient_compression
    if kind != "none" and world_size == 1:
        yield f"--gradient-compression {kind}: one process sends nothing; the gradient is only rounded"
    if kind == "fp16" and config.optim.precision not in ("fp16", "fp16-o2"):
        yield "--gradient-compression fp16 without a loss scale: a small range (docs/benchmarks.md)"
    schedule = config.schedule
    needs = {"lr_factor": "step", "lr_power": "polynomial", "lr_steps": "step", "lr_step_epochs": "step"}
    for name, needed in needs.items():
        also = "arcface-torch" if name == "lr_power" else needed
        if is_given(schedule, name) and schedule.lr_scheduler not in (needed, also):
            yield f"{flag(name)} goes with --lr-scheduler {needed}; this run's is {schedule.lr_scheduler}"
    if schedule.warmup_lr and not (schedule.warmup_steps or schedule.warmup_epochs):
        yield "--warmup-lr without effect: there is no warm-up (--warmup-steps, --warmup-epochs)"
    if guards.on_nan == "rollback" and not run.checkpoint_every and not (run.save_best and run.verbose):
        yield "--on-nan rollback without --checkpoint-every: nothing to go back to (docs/reliability.md)"
    if is_given(guards, "desync_every") and world_size == 1:
        yield "--desync-every without effect: there is one process"


def flat(config: Any) -> dict[str, Any]:
    """Returns the values of all flags of a Config, groups included, by name (with _)."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values |= flat(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values


def replaced(config: Any, values: dict[str, Any]) -> Any:
    """Returns a Config with these values, by flag name, in place of its own."""
    groups = {}
    for field in dataclasses.fields(config):
        group = getattr(config, field.name)
        if dataclasses.is_dataclass(group):
            of_group = {name: value for name, value in values.items() if name in vars(group)}
            groups[field.name] = dataclasses.replace(group, **of_group)  # type: ignore[type-var]
    return dataclasses.replace(config, **groups)


def with_defaults(config_type: type, values: dict[str, Any]) -> Any:
    """Returns a Config with these values (by flag name) instead of its defaults, unchecked: the command line is still
    to be read. Raises ValueError for a name that is no flag."""
    left = dict(values)
    config: Any = object.__new__(config_type)
    for field in dataclasses.fields(config_type):
        group = copy.copy(field.default)
        for name in vars(group).keys() & left.keys():
            object.__setattr__(group, name, left.pop(name))
        object.__setattr__(config, field.name, group)
    if left:
        raise ValueError(f"no flag of this recipe: {', '.join(sorted(left))}")
    return config


def is_given(group: Any, name: str) -> bool:
    """Returns whether a flag's value differs from its group's own default."""
    return getattr(group, name) != next(f.default for f in dataclasses.fields(group) if f.name == name)
