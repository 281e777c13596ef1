"""The PyTorch tutorial's job: a small ConvNet on MNIST's files, data parallel, in mixed precision if wanted.

    python train.py mnist --data-dir DIR                                           one process
    python train.py mnist --nodes 1 --gpus 2 --epochs 5                            two, started by this command
    python train.py mnist --nodes 2 --gpus 2 --nr 1 --master-addr ip1              on the second of two machines
    horovodrun -np 2 -H localhost:2 python train.py mnist --precision fp16-o2      the tutorial's Apex folder

No MNIST here? `partial-fc data digits --out data` writes real digits to train on. Results: docs/mnist.md.

B images of one forward pass, C classes, H = W = 28 pixels.
"""

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from logging import Logger
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partial_fc import checkpoint
from partial_fc.checkpoint.consistency import check_replicas
from partial_fc.comm import World
from partial_fc.data.idx import ImageSet, Split, read_set
from partial_fc.models.convnet import NUM_CLASSES, SIDE, ConvNet
from partial_fc.optim.backbone import named_state
from partial_fc.optim.gradient_sync import GradientSync, broadcast_module
from partial_fc.train import replicas
from partial_fc.train.job import EXIT_PREEMPTED
from partial_fc.train.log import LossCurve, Progress, open_files
from partial_fc.train.precision import Precision, Weights, choose
from partial_fc.train.running_statistics import RunningStatistics
from partial_fc.train.signals import StopSignals
from partial_fc.train.sync_batch_norm import convert
from recipes import compression, machine, mnist_checkpoint
from recipes.mnist_config import Config, parse
from recipes.mnist_data import Images, batches, pixels, updates_of_epoch
from recipes.mnist_evaluation import draw_mistakes, evaluate


@dataclass
class Run:
    """What learns, from what, and where it stands."""

    config: Config
    world: World
    device: torch.device
    logger: Logger
    train_images: Images
    test_images: Images
    model: nn.Module
    precision: Precision
    weights: Weights
    optimizer: torch.optim.Optimizer
    sync: GradientSync
    saver: checkpoint.Saver
    position: mnist_checkpoint.Position
    signals: StopSignals = field(default_factory=StopSignals)
    stopped: bool = False  # any process was asked to, by SIGTERM or SIGUSR1
    last_equal: int = 0  # the step of the last look at the replicas


def main(arguments: list[str]) -> int:
    """Parse, put the parts together, train, write what came out. Returns the exit status."""
    config = parse(arguments)
    world, device = machine.join(config)
    logger = open_files(config.models_root, world, bare=True)
    versions = machine.versions()
    logger.info(f"{world} on {device}; {json.dumps(versions)}")
    logger.info(f"configuration {json.dumps(dataclasses.asdict(config), default=str)}")

    # ---- data
    train_set, test_set = _read(config, "train"), _read(config, "t10k")
    num_updates = len(updates_of_epoch(config, len(train_set.label_N), world, epoch=0))
    logger.info(
        f"{len(train_set.label_N):,} images to train, {len(test_set.label_N):,} to test; an update sees {world.size} x "
        f"{config.batch_size} x {config.accumulate} (processes, batch, accumulated), an epoch has {num_updates}"
    )

    if num_updates < config.frequent:
        logger.info(f"note: no Step lines: an epoch has fewer updates than --frequent {config.frequent}")

    # ---- model, and what moves it
    precision = Precision(choose(config.precision, device, world), device)
    model, weights = _model(config, precision, world, logger)
    optimizer = torch.optim.SGD([p for _, p in weights.named_parameters()], config.lr, config.momentum)
    sync = GradientSync(model, world, exchange=compression.build(config))
    weights.bind_gradients(sync.gradient_of)
    if world.size == 1 and config.gradient_compression != "none":
        logger.info(
            f"note: one process: nothing travels, --gradient-compression {config.gradient_compression} only rounds"
        )

    # ---- start: a given checkpoint, else the newest of this run, else --load-amp, else from scratch
    run = Run(
        config, world, device, logger, Images(train_set), Images(test_set), model, precision, weights, optimizer, sync,
        checkpoint.Saver(config.models_root / "checkpoints", world, config.keep_checkpoints, keep_best=False),
        mnist_checkpoint.Position(),
    )  # fmt: skip
    run.position = mnist_checkpoint.resume(run, num_updates)
    check_replicas({**dict(weights.named_parameters()), **named_state(optimizer, weights)}, world)
    if _over(run) and machine.is_finished(config.models_root, world):
        logger.info(
            f"{config.models_root} is finished, see result.json; to go on give more --epochs or --max-steps, to start "
            "anew another --models-root"
        )
    else:
        _train_and_report(run, num_updates, versions)
    run.saver.close()
    if run.saver.last_failed:
        raise OSError(
            f"the last state, of step {run.position.step}, is in no checkpoint below {run.saver.root}: see above"
        )
    world.close()
    return EXIT_PREEMPTED if run.stopped else 0


def train(run: Run, num_updates: int) -> dict[str, Any]:
    """Runs to the end, writes the results. Returns what there is to tell of the run."""
    config, world, position = run.config, run.world, run.position
    curve = LossCurve(config.models_root, world, position.step)
    last_step = min(config.epochs * num_updates, config.max_steps or math.inf)
    progress = Progress(run.logger, config.models_root, world, config.frequent, position.step, int(last_step), 0)
    statistics = RunningStatistics(run.model)
    loss, seconds, num_images = math.nan, 0.0, 0
    evaluation = evaluate(run) if _over(run) else None

    while not _over(run):
        run.model.train()
        updates = updates_of_epoch(config, len(run.train_images), world, position.epoch)[position.update :]
        loaded = batches(run.train_images, updates, config.n_workers, run.device)
        for update in updates:
            if run.stopped:
                break
            began = time.perf_counter()
            world.step = position.step + 1
            loss = make_update(run, update, loaded, statistics)
            position.step += 1
            position.update += 1
            seconds += time.perf_counter() - began
            num_images += world.size * sum(map(len, update))
            curve.add(position.step, loss, config.lr)
            progress.advance()
            if position.update % config.frequent == 0:
                run.logger.info(
                    f"Epoch [{position.epoch + 1}/{config.epochs}], Step [{position.update}/{num_updates}], "
                    f"Loss: {loss:.4f}"
                )
                progress.scalars(position.step, {"train/loss": loss, "train/loss_scale": run.precision.loss_scale})
            if config.desync_every and position.step % config.desync_every == 0:
                compare_replicas(run)
            if position.step == config.max_steps:
                break

        if run.stopped:
            break
        # ---- after an epoch, or where --max-steps ends it: evaluate, save
        evaluation = evaluate(run)
        run.logger.info(f"Epoch [{position.epoch + 1}/{config.epochs}], {evaluation}")
        progress.scalars(position.step, {"test/accuracy": evaluation.accuracy})
        position.best = max(position.best, evaluation.accuracy)
        if position.update == num_updates:
            position.epoch, position.update = position.epoch + 1, 0
        mnist_checkpoint.save(run)
    progress.close()
    curve.close()
    if run.stopped:
        if position.update == num_updates:
            position.epoch, position.update = position.epoch + 1, 0
        mnist_checkpoint.save(run)
        return {}
    assert evaluation is not None
    if world.rank == 0:
        drawn = draw_mistakes(evaluation, run.test_images, config.models_root / "mistakes.png")
        run.logger.info(f"mistakes.png shows {drawn} of {len(evaluation.image_M)} mistakes" if drawn else "no mistakes")
    return {
        "loss": loss,
        "test_accuracy": evaluation.accuracy,
        "best_test_accuracy": position.best,
        "confusion": evaluation.confusion_CC.tolist(),  # of each label: how often it was taken for what
        "steps": position.step,
        "skipped_updates": position.skipped,
        "loss_scale": run.precision.loss_scale,
        "images_per_s": num_images / seconds if seconds else None,
    }


def make_update(
    run: Run,
    update: list[list[int]],
    loaded: Iterator[tuple[Tensor, Tensor]],
    statistics: RunningStatistics,
) -> float:
    """One update from the batches of `update`, whose images are the next ones of `loaded`. Returns the loss, its mean
    over the images of all processes: one number for all of them.

    Who divides: each process divides by the number of images of the whole update; everything after that is a sum.
    """
    precision, sync, world = run.precision, run.sync, run.world
    num_images = world.size * sum(map(len, update))
    sync.zero(precision.loss_scale, global_batch=num_images)
    if precision.scaler:
        statistics.keep()
    local_loss = torch.zeros((), dtype=torch.float64, device=run.device)
    for number in range(1, len(update) + 1):
        image_B1HW, label_B = next(loaded)
        with precision.autocast():
            logit_BC = run.model(precision.as_input(pixels(image_B1HW)))
        logit_BC = logit_BC.to(precision.parameter_dtype)
        loss = F.cross_entropy(logit_BC, label_B, reduction="sum") / num_images
        with sync.hold() if number < len(update) else nullcontext():
            (loss * precision.loss_scale).backward()
        local_loss += loss.detach()
    sync.wait()

    # One verdict for all ranks: replicas of which only some made an update would part for ever.
    asked = local_loss.new_tensor(run.signals.received is not None)
    local = torch.stack((local_loss, (~sync.finite()).double(), asked))
    total_loss, num_overflowed, num_asked = world.all_reduce(local, name="mnist/verdict").tolist()
    run.stopped = num_asked > 0
    overflowed = num_overflowed > 0 or not math.isfinite(total_loss)
    if overflowed and not precision.scaler:
        raise FloatingPointError(
            f"step {run.position.step + 1}: the loss is {total_loss}, the gradient {'not ' if num_overflowed else ''}"
            "finite; nothing was updated in this step, and the last checkpoint stands. The usual cause is a learning "
            f"rate that is too high: try less than --lr {run.config.lr}; with --gradient-compression fp16 also a sum "
            "of gradients beyond 65,504: try bf16"
        )
    if precision.scaler:
        precision.scaler.update(overflowed)
    if overflowed:
        sync.undo()
        statistics.restore()
        run.position.skipped += 1
        run.logger.info(
            f"step {run.position.step + 1}: the gradient overflowed, no update; the loss scale is now "
            f"{precision.loss_scale:g}"
        )
        return total_loss
    run.weights.bind_gradients(sync.gradient_of)
    run.optimizer.step()
    run.weights.publish()
    return total_loss


def compare_replicas(run: Run) -> None:
    """An error, on all ranks, where they do not hold the same model any more."""
    scaler, step = run.precision.scaler, run.position.step
    facts = {"loss scale": scaler.state() if scaler else 1.0}
    replicas.check(run.weights, run.optimizer, facts, step, run.last_equal, run.world)
    run.last_equal = step


def _read(config: Config, split: Split) -> ImageSet:
    found = read_set(config.data_dir, split, NUM_CLASSES)
    if found.image_NHW.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"{config.data_dir}: the {split} images have {' x '.join(map(str, found.image_NHW.shape[1:]))} pixels; the "
            f"ConvNet takes {SIDE} x {SIDE} only"
        )
    return found


def _model(config: Config, precision: Precision, world: World, logger: Logger) -> tuple[nn.Module, Weights]:
    """Equal on all ranks."""
    torch.manual_seed(config.seed)  # as the tutorial: its first weights
    model: nn.Module = ConvNet().to(precision.device, precision.parameter_dtype)
    broadcast_module(model, world)
    if config.sync_bn:
        model = convert(model, world)
    weights, note = precision.prepare(model)
    number = sum(p.numel() for p in model.parameters())
    logger.info(f"ConvNet: {number:,} parameters; precision {precision.mode}")
    if note:
        logger.info(f"note: {note}")
    return model, weights


def _over(run: Run) -> bool:
    return run.position.epoch >= run.config.epochs or (
        run.config.max_steps is not None and run.position.step >= run.config.max_steps
    )


def _train_and_report(run: Run, num_updates: int, versions: dict[str, str]) -> None:
    began, first_step = time.perf_counter(), run.position.step
    run.last_equal = first_step
    with StopSignals(run.world.rank) as run.signals:
        found = train(run, num_updates)
    if run.stopped:
        run.logger.info(f"stopped at step {run.position.step}, as asked; the same command goes on from there")
        return
    took = timedelta(seconds=time.perf_counter() - began)
    run.logger.info(f"Training complete in: {took}")
    contract = {
        "input": "float32 (N, 1, 28, 28), white on black, pixel / 255",
        "output": "float32 (N, 10), logits",
        "step": str(run.position.step),
    }
    model = mnist_checkpoint.model_state(run)
    if run.world.rank == 0:
        root = run.config.models_root
        checkpoint.save_model(root / "model.safetensors", model, contract)
        result = {
            **found,
            "seconds": took.total_seconds(),
            "precision": run.precision.mode,
            "world_size": run.world.size,
            "backend": run.world.backend,
            "gradient_bytes_per_step": dataclasses.asdict(run.sync.step_bytes()),
            "traffic_per_step": run.world.traffic.per_step(max(1, run.position.step - first_step)),
            "configuration": dataclasses.asdict(run.config),
            "versions": versions,
        }
        checkpoint.write_json(result, root / "result.json")
    run.world.barrier(name="end")
