"""Face recognition, and every other task with very many classes: a backbone, Partial FC, verification.

    horovodrun -np 8 -H localhost:8 bash config.sh          what config.sh says, on the GPUs of this machine
    python train.py face --dataset emore --rec DIR          one process, ArcFace/InsightFace records
    python train.py face --dataset 100w --max-steps 200     a million classes, no data: how fast is this machine?

Results: see the table in README.md.
"""

import dataclasses
import json
import math
from contextlib import ExitStack, closing
from dataclasses import dataclass
from logging import Logger
from pathlib import Path

import torch
from torch import nn

from partial_fc import checkpoint, keyed, models
from partial_fc.checkpoint.buddy import Memory
from partial_fc.checkpoint.class_names import names_of
from partial_fc.comm import World, elastic
from partial_fc.data import Loader, Source, Synthetic, open_on_all, open_source
from partial_fc.data.augment import mirror
from partial_fc.demo.augment import glyph
from partial_fc.evaluate import Verification
from partial_fc.optim import backbone as backbone_optimizer
from partial_fc.optim.gradient_sync import GradientSync, broadcast_module
from partial_fc.optim.schedule import Continued, Schedule, linear_scaling
from partial_fc.train import activation_checkpointing
from partial_fc.train.commits import Commits
from partial_fc.train.guards import Guards
from partial_fc.train.job import EXIT_PREEMPTED, Job
from partial_fc.train.log import open_files
from partial_fc.train.loop import train
from partial_fc.train.precision import Precision, choose
from partial_fc.train.sync_batch_norm import convert
from recipes import compression, face_checks, machine
from recipes.face_config import Config, parse
from recipes.face_head import build_head, head_lr_ratio
from recipes.face_run import Start, State, buddy_every, go_on, restore, resume, write_results


def main(arguments: list[str]) -> int:
    """Parse, join the others, run; returns the exit status. Where hosts come and go, anew in each world."""
    config, notes = parse(arguments)
    memory = Memory()

    def in_this_world() -> int:
        world, device = machine.join(config)
        return run(config, notes, world, device, memory)

    return elastic.run(in_this_world) or 0


def run(config: Config, notes: list[str], world: World, device: torch.device, memory: Memory) -> int:
    """Puts the parts together, trains, writes what came out. memory: from the worlds before."""
    logger = open_files(config.models_root, world)
    versions = machine.versions()
    logger.info(f"{world} on {device}; {json.dumps(versions)}")
    logger.info(f"configuration {json.dumps(dataclasses.asdict(config), default=str)}")
    for note in notes:
        logger.info(f"note: {note}")

    data = _data(config, world, memory, logger)
    with ExitStack() as parts:
        state = _state(config, data, parts, world, device, logger)

        # ---- start: a given checkpoint, else the newest of this run, else --pretrained and --head-centres, else anew
        saver = parts.enter_context(closing(checkpoint.Saver(config.checkpoints, world, config.keep_checkpoints)))
        start = resume(config, state, memory, data.source, logger)
        schedule = go_on(config, data.course, start, len(data.source), data.global_batch, logger)
        if start.step == schedule.total_steps and machine.is_finished(config.models_root, world):
            logger.info(
                f"{config.models_root} is finished, see result.json; to go on give more --max-steps or --epochs, to "
                "start anew another --models-root"
            )
            world.close()
            return 0

        # ---- train
        with _loader(config, data.source, start.position, world, device) as loader:
            job = _job(config, data, state, start, schedule, loader, saver, memory, logger, versions)
            outcome = train(job)
        if outcome.stopped:
            logger.info(f"stopped at step {job.step}, as asked; the same command goes on from there")
        else:
            if world.rank == 0:
                write_results(config, job, outcome, data.num_classes, versions)
            world.barrier(name="end")
            logger.info(f"Training is over! {config.models_root / 'result.json'}")
        if not outcome.saved:
            raise OSError(
                f"the last state, of step {job.step}, is in no checkpoint below {config.checkpoints}: see above"
            )
        world.close()
        return EXIT_PREEMPTED if outcome.stopped else 0


@dataclass(frozen=True)
class _Data:
    """What is learned, and in how many steps."""

    source: Source
    num_classes: int
    global_batch: int
    course: Schedule
    verifications: list[Verification]


def _data(config: Config, world: World, memory: Memory, logger: Logger) -> _Data:
    """A collective."""
    age_W = world.all_gather(torch.tensor([memory.age]), name="face/age").tolist()
    source = open_on_all(lambda: _source(config), world, [age > 0 for age in age_W])
    num_classes = config.num_classes or source.num_classes
    global_batch = config.batch_size * world.size * config.accumulate
    steps_per_epoch = len(source) / global_batch
    total_steps = config.max_steps or math.ceil(config.epochs * steps_per_epoch)
    logger.info(
        f"{len(source)} images of {num_classes} classes; global batch {world.size} x {config.batch_size}"
        f"{f' x {config.accumulate}' if config.accumulate > 1 else ''} = {global_batch}; {steps_per_epoch:.1f} steps "
        f"an epoch, {total_steps} steps in all"
    )
    if not any(age_W):  # else these images are being trained on, which no second look may end or hold up
        for line in face_checks.look_at_data(config, source, num_classes, world):
            logger.info(line)
    verifications = [
        Verification(path, config.image_size, config.batch_size * 2, flip=config.mirror)
        for path in _verification_paths(config)
    ]
    course = _schedule(config, global_batch, steps_per_epoch, total_steps, logger)
    return _Data(source, num_classes, global_batch, course, verifications)


def _state(config: Config, data: _Data, parts: ExitStack, world: World, device: torch.device, logger: Logger) -> State:
    """The model, and what moves it; parts closes the head. A collective."""
    precision = Precision(choose(config.precision, device, world), device)
    backbone = _backbone(config, device, precision.parameter_dtype, world)
    weights, slow = precision.prepare(backbone)
    head = parts.enter_context(build_head(config, data.num_classes, world, precision))
    optimizer = backbone_optimizer.build(config.optimizer, weights, config.momentum, config.weight_decay)
    sync = GradientSync(backbone, world, exchange=compression.build(config))
    weights.bind_gradients(sync.gradient_of)
    logger.info(
        f"{config.network}: {sum(p.numel() for p in backbone.parameters()):,} parameters; precision "
        f"{precision.mode}; this rank has the centres of classes {head.shard.start} to {head.shard.stop} of "
        f"{data.num_classes}; kernel {head.kernel.name}, {head.optimizer}"
    )
    for note in filter(None, (slow, *face_checks.notes(config, head))):
        logger.info(f"note: {note}")
    return State(weights, optimizer, head, sync, precision)


def _job(
    config: Config,
    data: _Data,
    state: State,
    start: Start,
    schedule: Schedule | Continued,
    loader: Loader,
    saver: checkpoint.Saver,
    memory: Memory,
    logger: Logger,
    versions: dict[str, str],
) -> Job:
    """A collective."""
    world = state.head.world
    return Job(
        world=world,
        device=state.precision.device,
        seed=config.seed,
        loader=loader,
        backbone=state.weights.module,
        schedule=schedule,
        accumulate=config.accumulate,
        clip=config.clip,
        head_clip=config.head_clip,
        head_lr_ratio=head_lr_ratio(config),
        models_root=config.models_root,
        logger=logger,
        verifications=data.verifications,
        verbose=config.verbose,
        frequent=config.frequent,
        telemetry_every=config.telemetry_every,
        checkpoint_every=config.checkpoint_every,
        guards=Guards(
            config.on_nan,
            config.max_skips,
            config.max_rollbacks,
            config.desync_every,
            restore=lambda: restore(config, state, saver, logger),
        ),
        saver=saver,
        commits=Commits(memory, world, buddy_every(config)),
        save_best=config.save_best,
        class_names=names_of(data.source, data.num_classes),
        facts={"configuration": dataclasses.asdict(config), "versions": versions},
        **vars(state),
        **vars(start),
    )


def _source(config: Config) -> Source:
    if config.synthetic:
        assert config.num_classes is not None
        return Synthetic(config.num_classes, config.image_size, config.num_images)
    assert config.rec is not None
    return open_source(config.rec, config.num_classes)


def _verification_paths(config: Config) -> list[Path]:
    if config.synthetic or config.rec is None:
        return []
    folder = config.rec if config.rec.is_dir() else config.rec.parent
    if config.val_targets is None:
        return sorted(folder.glob("*.bin"))
    paths = [Path(t) if t.endswith(".bin") else folder / f"{t}.bin" for t in config.val_targets]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise ValueError(
            f"verification set(s) not found: {', '.join(missing)}; name those that are there with --val-targets, or "
            "none with `--val-targets` alone"
        )
    return paths


def _loader(config: Config, source: Source, position: int, world: World, device: torch.device) -> Loader:
    return Loader(
        source,
        image_size=config.image_size,
        batch_size=config.batch_size,
        rank=world.rank,
        world_size=world.size,
        seed=config.seed,
        position=position,
        augment=glyph if config.augment == "glyph" else mirror if config.mirror else None,
        num_workers=config.num_workers,
        max_bad_records=config.max_bad_records,
        pin_memory=device.type == "cuda",
    )


def _backbone(config: Config, device: torch.device, dtype: torch.dtype, world: World) -> nn.Module:
    """Equal on all ranks."""
    torch.manual_seed(keyed.fold(config.seed, *b"backbone"))
    backbone = models.build(config.network, config.embedding_size, config.image_size, dropout=config.dropout)
    if config.pretrained:
        models.load_arcface_torch(backbone, config.pretrained)
    backbone.to(device, dtype)
    if config.channels_last:
        backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    broadcast_module(backbone, world)
    if config.sync_bn:
        convert(backbone, world)
    return activation_checkpointing.enable(backbone) if config.activation_checkpointing else backbone


def _schedule(config: Config, global_batch: int, steps_per_epoch: float, total_steps: int, logger: Logger) -> Schedule:
    lr = config.lr
    if config.lr_scaling == "linear":
        lr, arithmetic = linear_scaling(config.lr, config.base_batch_size, global_batch)
        logger.info(arithmetic)
    if config.lr_scheduler == "step" and global_batch != config.base_batch_size:
        logger.info(
            f"note: --lr-steps and --max-steps count updates and are not scaled: this run's updates see {global_batch} "
            f"images, those of the preset {config.base_batch_size}"
        )
    return Schedule(
        kind=config.lr_scheduler,
        base_lr=lr,
        total_steps=total_steps,
        warmup_steps=config.warmup_steps + round(config.warmup_epochs * steps_per_epoch),
        decay_steps=config.lr_steps if config.lr_scheduler == "step" else (),
        power=config.lr_power,
    )
