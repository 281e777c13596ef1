"""Face recognition, and every other task with very many classes: a backbone, Partial FC, verification.

    horovodrun -np 8 -H localhost:8 bash config.sh          what config.sh says, on the GPUs of this machine
    python train.py face --dataset emore --rec DIR          one process, ArcFace/InsightFace records
    python train.py face --dataset 100w --max-steps 200     a million classes, no data: how fast is this machine?

Results: see the table in README.md.
"""

import dataclasses
import json
import math
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from partial_fc import __version__, checkpoint, comm, keyed, models
from partial_fc.comm import World
from partial_fc.data import Loader, Source, Synthetic, open_source
from partial_fc.data.augment import glyph, mirror
from partial_fc.evaluate import Verification
from partial_fc.head import PartialFC
from partial_fc.optim import backbone as backbone_optimizer
from partial_fc.optim.gradient_sync import GradientSync, broadcast_module
from partial_fc.optim.schedule import Schedule, linear_scaling
from partial_fc.train.log import open_files
from partial_fc.train.loop import Job, Outcome, train
from partial_fc.train.sync_batch_norm import convert
from recipes import face_checks
from recipes.face_config import Config, parse
from recipes.face_head import build_head, head_lr_ratio

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
)


def main(arguments: list[str]) -> None:
    """Parse, put the parts together, train, write what came out."""
    config, notes = parse(arguments)
    device_type = _device_type(config)
    world = comm.init(device_type)
    device = _own_device(device_type, world)
    _share_cores(world)
    logger = open_files(config.models_root, world)
    versions = _versions()
    logger.info(f"{world} on {device}; {json.dumps(versions)}")
    logger.info(f"configuration {json.dumps(dataclasses.asdict(config), default=str)}")
    for note in notes:
        logger.info(f"note: {note}")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may not repeat itself
        torch.use_deterministic_algorithms(True)

    # ---- data
    source = _source(config)
    num_classes = config.num_classes or source.num_classes
    global_batch = config.batch_size * world.size
    steps_per_epoch = len(source) / global_batch
    total_steps = config.max_steps or math.ceil(config.epochs * steps_per_epoch)
    logger.info(
        f"{len(source)} images of {num_classes} classes; global batch {world.size} x {config.batch_size} = "
        f"{global_batch}; {steps_per_epoch:.1f} steps an epoch, {total_steps} steps in all"
    )
    verifications = [
        Verification(path, config.image_size, config.batch_size * 2, flip=config.mirror)
        for path in _verification_paths(config)
    ]

    schedule = _schedule(config, global_batch, steps_per_epoch, total_steps, logger)

    # ---- model
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    backbone = _backbone(config, device, dtype, world)
    with build_head(config, num_classes, world, device, dtype) as head:
        optimizer = backbone_optimizer.build(config.optimizer, backbone, config.momentum, config.weight_decay)
        logger.info(
            f"{config.network}: {sum(p.numel() for p in backbone.parameters()):,} parameters; this rank has the "
            f"centres of classes {head.shard.start} to {head.shard.stop} of {num_classes}; kernel {head.kernel.name}, "
            f"{head.optimizer}"
        )
        for note in face_checks.notes(config, head):
            logger.info(f"note: {note}")

        # ---- start: a given checkpoint, else the newest of this run, else --pretrained, else from scratch
        step, position, best = _resume(config, backbone, optimizer, head, total_steps, logger)
        if step == total_steps and (config.models_root / "result.json").exists():
            logger.info(
                f"{config.models_root} is finished, see result.json; to go on give more --max-steps or --epochs, to "
                "start anew another --models-root"
            )
            world.close()
            return

        # ---- train
        with _loader(config, source, position, world, device) as loader:
            job = Job(
                world=world,
                device=device,
                seed=config.seed,
                loader=loader,
                backbone=backbone,
                head=head,
                optimizer=optimizer,
                sync=GradientSync(backbone, world),
                schedule=schedule,
                dtype=dtype,
                autocast=config.precision == "bf16",
                clip=config.clip,
                head_clip=config.head_clip,
                head_lr_ratio=head_lr_ratio(config),
                models_root=config.models_root,
                logger=logger,
                verifications=verifications,
                verbose=config.verbose,
                frequent=config.frequent,
                telemetry_every=config.telemetry_every,
                checkpoint_every=config.checkpoint_every,
                keep_checkpoints=config.keep_checkpoints,
                configuration=dataclasses.asdict(config),
                step=step,
                position=position,
                best=best,
            )
            outcome = train(job)
        if world.rank == 0:
            _write_results(config, job, outcome, num_classes, versions)
        world.barrier(name="end")
        logger.info(f"Training is over! {config.models_root / 'result.json'}")
        world.close()


def _device_type(config: Config) -> Literal["cpu", "cuda"]:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ValueError("--device cuda: torch finds no GPU here (see `nvidia-smi`, and torch's CUDA build)")
    return "cuda" if available and config.device != "cpu" else "cpu"


def _share_cores(world: World) -> None:
    """The processes of a host share its cores. Threads of several that all want every core wait for each other: steps
    then take fifty times as long. config.sh and torchrun set OMP_NUM_THREADS; whoever sets it is left alone."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))


def _own_device(device_type: str, world: World) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"{world}: local rank {world.local_rank} but {torch.cuda.device_count()} GPU(s) on this host; start as "
            "many processes a host as it has GPUs, or look at CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


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
    backbone.to(device, dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    broadcast_module(backbone, world)
    return convert(backbone, world) if config.sync_bn else backbone


def _schedule(
    config: Config, global_batch: int, steps_per_epoch: float, total_steps: int, logger
) -> Schedule:
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


def _resume(
    config: Config,
    backbone: nn.Module,
    optimizer: torch.optim.Optimizer,
    head: PartialFC,
    total_steps: int,
    logger,
) -> tuple[int, int, dict[str, float]]:
    """(step, position in the data, best scores) to start from; loads the state."""
    newest = checkpoint.newest(config.models_root / "checkpoints")
    folder = {"never": None, "auto": newest}.get(config.resume, Path(config.resume))
    start_step = checkpoint.Checkpoint(folder).step if folder else -1
    if newest and start_step < checkpoint.Checkpoint(newest).step:
        # Checkpoints are kept and found by their step: those of the other run would count as the newest.
        raise ValueError(
            f"{newest} is ahead of where this run would start (--resume {config.resume}); use another --models-root, "
            "or remove the checkpoints that are not wanted"
        )
    if folder is None:
        return 0, 0, {}
    found = checkpoint.Checkpoint(folder)
    if found.step > total_steps:
        raise ValueError(
            f"{folder} is at step {found.step}, beyond this run's {total_steps}; use another --models-root or "
            "more --epochs"
        )
    for name in _SAME_RUN:
        then, now = found.manifest["configuration"][name], getattr(config, name)
        now = list(now) if isinstance(now, tuple) else now  # as JSON has it
        if str(then) != str(now):
            logger.info(
                f"note: {folder} was trained with --{name.replace('_', '-')} {then}, this run has {now}: not the same "
                "run"
            )
    backbone.load_state_dict(found.backbone())
    backbone_optimizer.load_named_state(optimizer, backbone, found.optimizer())
    for note in found.load_head(head):
        logger.info(f"note: {note}")
    logger.info(f"resumed from {folder}")
    return found.step, found.manifest["position"], found.manifest["best"]


def _versions() -> dict[str, str]:
    packages = ("torch", "horovod", "numpy", "opencv-python-headless", "safetensors")
    found = {"partial-fc": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _write_results(
    config: Config, job: Job, outcome: Outcome, num_classes: int, versions: dict[str, str]
) -> None:
    contract = {
        "network": config.network,
        "embedding_size": str(config.embedding_size),
        "image_size": str(config.image_size),
        "input": "float32 (N, 3, H, W), RGB, (pixel - 127.5) / 127.5",
        "output": "float32 (N, embedding_size), not normalised",
        "num_classes": str(num_classes),
        "step": str(job.step),
    }
    checkpoint.save_model(config.models_root / "model.safetensors", job.backbone.state_dict(), contract)
    checkpoint.write_json(
        {
            "loss": outcome.loss,
            "evaluations": outcome.evaluations,
            "best": job.best,
            "images_per_s": outcome.images_per_s,
            "steps": job.step,
            "world_size": job.world.size,
            "backend": job.world.backend,
            "traffic_per_step": outcome.traffic,
            "configuration": dataclasses.asdict(config),
            "versions": versions,
        },
        config.models_root / "result.json",
    )
