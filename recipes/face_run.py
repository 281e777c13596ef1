"""What a run of recipe `face` finds in its folder, and what it leaves there."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path

import torch

from partial_fc import checkpoint
from partial_fc.checkpoint.class_names import check_class_names
from partial_fc.checkpoint.consistency import check_replicas, newest_common, open_checkpoint
from partial_fc.checkpoint.folders import step_of
from partial_fc.checkpoint.initial_centres import check_whole, load_centres, open_centres
from partial_fc.checkpoint.peer.commits import Memory
from partial_fc.checkpoint.peer.recover import PeerCheckpoint, recover
from partial_fc.comm import elastic
from partial_fc.data import Source
from partial_fc.head import PartialFC
from partial_fc.machine import peak_bytes
from partial_fc.optim.backbone import load_named_state, named_state
from partial_fc.optim.gradient_sync import GradientSync
from partial_fc.optim.schedule import Continued, Schedule, continued
from partial_fc.train.job import Job, Outcome
from partial_fc.train.precision import LossScaler, Precision, Weights
from recipes.face_config import Config

# Flags that make another run of one that is resumed, although nothing refuses them.
_SAME_RUN = (
    *(
        "dataset",
        "rec",
        "network",
        "seed",
        "image_size",
        "sample_rate",
        "loss",
        "scale",
        "margins",
        "optimizer",
    ),
    *("head_optimizer", "centre_dtype", "centre_state_dtype", "head_catch_up", "hard_negatives"),
    *("precision", "accumulate", "gradient_compression"),
)


@dataclass(frozen=True)
class State:
    """All that a checkpoint restores, but for where the run stands."""

    weights: Weights
    optimizer: torch.optim.Optimizer
    head: PartialFC
    sync: GradientSync
    precision: Precision


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    step: int = 0
    position: int = 0  # in the data
    best: dict[str, float] = field(default_factory=dict)
    best_score: float = 0.0
    left_out: list[tuple[int, int]] = field(default_factory=list)  # of the data, by rollbacks


def resume(config: Config, state: State, memory: Memory, source: Source, logger: Logger) -> Start:
    """Gives the run the state that it starts from: what the ranks of the world before have kept, else that of --resume,
    else the centres of --head-centres. A collective. Raises ValueError where the source's classes have other names."""
    world = state.head.world
    found: checkpoint.Checkpoint | PeerCheckpoint | None = None
    if elastic.active():
        found = recover(memory, world, config.checkpoints)
    if found is None:
        found = _checkpoint(config, state, source, logger, is_first_world=memory.age <= 1)
    if found is None:
        return Start()
    for name in _SAME_RUN:
        now = getattr(config, name)
        then = found.manifest["configuration"].get(name, now)  # older runs did not have every flag
        now = list(now) if isinstance(now, tuple) else now  # as JSON has it
        if str(then) != str(now):
            logger.info(
                f"note: {found.folder} was trained with --{name.replace('_', '-')} {then}, this run has {now}: not the "
                "same run"
            )
    _load(found, state, logger)
    logger.info(f"resumed from {found.folder}")
    manifest = found.manifest
    left_out = [(begin, end) for begin, end in manifest.get("left_out", [])]
    return Start(found.step, manifest["position"], manifest["best"], manifest.get("best_score") or 0.0, left_out)


def _checkpoint(
    config: Config, state: State, source: Source, logger: Logger, is_first_world: bool
) -> checkpoint.Checkpoint | None:
    """The one to start from, whole and with the classes of this source. None: there is none to be gone on from, and
    the centres are those of --head-centres, if given. A collective."""
    newest = newest_common(config.checkpoints, state.head.world)
    folder = {"never": None, "auto": newest}.get(config.resume, Path(config.resume))
    if newest and not is_first_world and not _is_ahead(folder, newest):
        folder = newest  # written by this run since it began, so what it began from is not needed
    found = open_checkpoint(folder, state.head.world)
    if newest and (found.step if found else -1) < step_of(newest):
        # Checkpoints are kept and found by their step: those of the other run would count as the newest.
        raise ValueError(
            f"{newest} is ahead of where this run would start (--resume {config.resume}); use another --models-root, "
            "or remove the checkpoints that are not wanted"
        )
    centres = None
    if config.head_centres and found is None:
        centres = open_centres(config.head_centres, state.head.world)
    for given in filter(None, (found, centres)):
        for note in check_class_names(given, source):
            logger.info(f"note: {note}")
    if found is not None:
        check_whole(found)
    elif centres is not None:
        load_centres(centres, state.head)
        logger.info(f"class centres from {centres.folder}")
    return found


def _is_ahead(folder: Path | None, newest: Path) -> bool:
    """By their names, which are the same on all ranks; newest is a checkpoint."""
    if folder is None or not folder.name.removeprefix("step-").isdecimal():
        return False
    return step_of(folder) > step_of(newest)


def go_on(
    config: Config, course: Schedule, start: Start, num_samples: int, global_batch: int, logger: Logger
) -> Schedule | Continued:
    """The schedule of a run that has come to `start`, maybe by steps of other sizes: --epochs count samples, so what is
    left of them decides how many steps are left. --max-steps count updates, whatever these see. Raises ValueError where
    the start is beyond the end."""
    seen = start.position - sum(end - begin for begin, end in start.left_out)
    if config.max_steps or seen == start.step * global_batch:
        if start.step > course.total_steps:
            raise ValueError(
                f"the checkpoint to go on from is at step {start.step}, beyond this run's {course.total_steps}; use "
                "another --models-root or more --epochs"
            )
        return course
    total = config.epochs * num_samples
    schedule = continued(course, start.step, seen, total, global_batch)
    left, like = schedule.total_steps - start.step, start.step + schedule.shift
    logger.info(
        f"{seen:,} of {total:,.0f} images have been seen in {start.step} steps; with {global_batch} a step {left} more "
        f"steps remain, {schedule.total_steps} in all; learning rate {schedule.lr(start.step):g}, as in step "
        f"{like:.1f} of {course.total_steps} of this size"
    )
    return schedule


def buddy_every(config: Config) -> int:
    """Steps between commits; 0: none. Only ranks that come and go go on from them. Centres in files are more than fit
    into memory."""
    if not elastic.active():
        return 0
    if config.buddy_every is None:
        return 0 if config.centre_place == "disk" else 100
    return config.buddy_every


def restore(config: Config, state: State, saver: checkpoint.Saver, logger: Logger) -> tuple[int, int] | None:
    """Brings back the newest complete checkpoint of this run, or the one that it started from, while it runs. (Step,
    position in the data); none where there is neither. A collective."""
    world = state.head.world
    saver.finish()
    given = None if config.resume in ("auto", "never") else Path(config.resume)
    newest = newest_common(config.checkpoints, world)
    if newest is None or _is_ahead(given, newest):  # what is older there is of another run
        newest = given
    found = open_checkpoint(newest, world)
    if found is None:
        return None
    _load(found, state, logger)
    return found.step, found.manifest["position"]


def _load(found: checkpoint.Checkpoint | PeerCheckpoint, state: State, logger: Logger) -> None:
    """What the checkpoint does not have starts anew, whatever `state` was before."""
    state.weights.load_state_dict(found.backbone())
    load_named_state(state.optimizer, state.weights, found.optimizer())
    check_replicas(
        {**state.weights.state_dict(), **named_state(state.optimizer, state.weights)},
        state.head.world,
    )
    buffers = dict(state.weights.module.named_buffers())
    for name, buffer in found.buffers(state.head.world).items():
        buffers[name].copy_(buffer)
    for note in (*found.load_head(state.head), *_load_exchange(found, state)):
        logger.info(f"note: {note}")
    if state.precision.scaler:
        state.precision.scaler.load_state(found.manifest.get("loss_scaler", LossScaler().state()))


def _load_exchange(found: checkpoint.Checkpoint | PeerCheckpoint, state: State) -> Iterator[str]:
    """What the gradient compression remembers. Another compression starts anew."""
    remembered = found.exchange(state.head.world)
    if remembered.keys() == state.sync.state().keys():
        state.sync.load_state(remembered)
        return
    state.sync.reset()
    if remembered:
        yield f"{found.folder} was trained with another --gradient-compression: what that still owed is left out"


def write_results(config: Config, job: Job, outcome: Outcome, num_classes: int, versions: dict[str, str]) -> None:
    contract = {
        "network": config.network,
        "embedding_size": str(config.embedding_size),
        "image_size": str(config.image_size),
        "input": "float32 (N, 3, H, W), RGB, (pixel - 127.5) / 127.5",
        "output": "float32 (N, embedding_size), not normalised",
        "num_classes": str(num_classes),
        "step": str(job.step),
    }
    checkpoint.save_model(config.models_root / "model.safetensors", job.weights.state_dict(), contract)
    checkpoint.write_json(
        {
            "loss": outcome.loss,
            "evaluations": outcome.evaluations,
            "best": job.best,
            "images_per_s": outcome.images_per_s,
            "peak_memory_bytes": peak_bytes(job.device),
            "steps": job.step,
            "world_size": job.world.size,
            "backend": job.world.backend,
            "traffic_per_step": outcome.traffic,
            "gradient_bytes_per_step": dataclasses.asdict(outcome.exchanged),
            "configuration": dataclasses.asdict(config),
            "versions": versions,
        },
        config.models_root / "result.json",
    )
