"""The PyTorch tutorial's job: a small ConvNet on MNIST's files, data parallel, in mixed precision if wanted.

    python train.py mnist --data-dir DIR                                           one process
    python train.py mnist --nodes 1 --gpus 2 --epochs 5                            two, started by this command
    python train.py mnist --nodes 2 --gpus 2 --nr 1 --master-addr ip1              on the second of two machines
    horovodrun -np 2 -H localhost:2 python train.py mnist --precision fp16-o2      the tutorial's Apex folder
    python train.py mnist --engine mxnet --network lenet                           MXNet's job: mnist_kvstore.py

No MNIST here? `partial-fc data digits --out data` writes real digits to train on. Results: docs/mnist.md.
"""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import tyro

from partial_fc import checkpoint, flags
from partial_fc.checkpoint.consistency import check_replicas
from partial_fc.checkpoint.snapshot import Snapshot
from partial_fc.data.idx import IdxSource, Split
from partial_fc.data.order import PerEpoch
from partial_fc.data.transform import pixels
from partial_fc.evaluate import Classification
from partial_fc.flags import ExchangeFlags, Flags, GuardFlags, LaunchFlags, OptimFlags, RunFlags, ScheduleFlags
from partial_fc.foreign import apex
from partial_fc.foreign.state_dicts import check_fits
from partial_fc.head import CrossEntropy
from partial_fc.models.convnet import NUM_CLASSES, SIDE, ConvNet
from partial_fc.models.inputs import MNIST
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.log import Interval, StepLine
from partial_fc.train.loop import train
from partial_fc.train.precision import LossScaler
from partial_fc.train.run import Run, run_in_worlds

from . import mnist_kvstore
from .compat import fit_py


@dataclass(frozen=True, kw_only=True)
class MnistFlags:
    """What is trained on, and files of other programs."""

    data_dir: Path = Path("data")
    """Folder of MNIST's four files, compressed or not; they may also lie in its MNIST/raw. Nothing is downloaded:
    `partial-fc data digits --out DIR` writes a small set of real digits."""
    n_workers: int = 0
    """Threads that read ahead, for each process that trains; 0: it reads itself."""
    engine: Literal["torch", "mxnet"] = "torch"
    """What computes. mxnet: another job, with flags of its own: MXNet's train_mnist.py over a key-value store;
    `--engine mxnet --help` lists them."""
    load_amp: Path | None = None
    """Start from an Apex checkpoint ({'model', 'optimizer', 'amp'}): weights, momentum, loss scale."""
    save_amp: Path | None = None
    """Write one with every checkpoint."""

    def __post_init__(self) -> None:
        flags.check_least(self, n_workers=0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains the PyTorch tutorial's ConvNet on MNIST files. Defaults are the tutorial's. It is evaluated and saved
    after each epoch."""

    mnist: Flags[MnistFlags] = MnistFlags()
    optim: Flags[OptimFlags] = OptimFlags(batch_size=100, momentum=0.0, weight_decay=0.0)
    schedule: Flags[ScheduleFlags] = ScheduleFlags(lr=1e-4, lr_scaling="none", lr_scheduler="constant", epochs=2.0)
    run: Flags[RunFlags] = RunFlags(
        models_root=Path("runs/mnist-DATA-NETWORK"),
        frequent=100,
        verbose=0,
        checkpoint_every=0,
        keep_checkpoints=2,
        save_best=False,
    )
    guards: Flags[GuardFlags] = GuardFlags()
    exchange: Flags[ExchangeFlags] = ExchangeFlags()
    launch: Flags[LaunchFlags] = LaunchFlags()

    def __post_init__(self) -> None:
        load, save = self.mnist.load_amp, self.mnist.save_amp
        if save is not None and self.optim.precision == "fp64":
            raise ValueError("--save-amp with --precision fp64: Apex's files hold fp32 weights")
        if load is not None and self.run.resume not in ("auto", "never"):
            raise ValueError(
                f"--load-amp {load} and --resume {self.run.resume} both say where to start; give one of them"
            )


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if fit_py.asked_for(arguments):
        return mnist_kvstore.start(arguments)
    config = parse(arguments)
    return run_in_worlds("mnist", config, [], train_here, bare=True, called=(config.mnist.data_dir, "convnet"))


def train_here(run: Run) -> int:
    """Puts the parts together, trains, writes what came out."""
    config = run.config

    # ---- data
    train_source = run.open_data(lambda: _source(config, "train"))
    test = TestSet("test", _source(config, "t10k"), pixels, top=5)
    test.epochs = config.schedule.epochs
    order = PerEpoch(len(train_source), config.run.seed)
    updates = math.ceil(len(train_source) / run.global_batch)
    if updates < config.run.frequent:
        run.note(f"no Step lines: an epoch has {updates} updates, fewer than --frequent {config.run.frequent}")

    with ExitStack() as parts:
        # ---- model
        torch.manual_seed(config.run.seed)  # as the tutorial: its first weights
        backbone = run.backbone(ConvNet(), MNIST, {"network": "convnet", "output": "float32 (N, 10), logits"})
        head = CrossEntropy(NUM_CLASSES, run.world, backbone.precision.parameter_dtype)

        # ---- start: a given checkpoint, else the newest of this run, else --load-amp, else from scratch
        saver = parts.enter_context(run.saver(_Saver))
        saver.amp = (config.mnist.save_amp, backbone)
        start = run.resume(backbone, head, train_source, may_change=("n_workers", "load_amp", "save_amp", "data_dir"))
        if config.mnist.load_amp:
            _load_amp(run, backbone, config.mnist.load_amp, resumed=start.step > 0)
        loader = parts.enter_context(run.loader(train_source, pixels, start, order, num_workers=config.mnist.n_workers))
        schedule = run.schedule(start, order)
        if run.is_finished(start, schedule):
            return 0

        # ---- train
        line = TutorialLine(
            config.run.frequent, schedule.total_steps, len(train_source), run.global_batch, config.schedule.epochs
        )
        job = run.job(loader, backbone, head, schedule, [test], saver, start, line, each_epoch=True)
        outcome = train(job)
        status = run.finish(job, outcome, {} if outcome.stopped else _results(test, outcome.evaluations, start.best))
        if not outcome.stopped:
            run.logger.info(f"Training complete in: {timedelta(seconds=run.seconds)}")
        return status


@dataclass(frozen=True)
class TutorialLine(StepLine):
    """The tutorial's line, every `frequent` updates of an epoch."""

    update_size: int
    epochs: float

    def due(self, step: int, position: int) -> bool:
        return self._update(position)[1] % self.frequent == 0

    def text(self, step: int, position: int, loss: float, lr: float, since: Interval) -> str:
        epoch, update = self._update(position)
        per_epoch = math.ceil(self.num_samples / self.update_size)
        return f"Epoch [{epoch + 1}/{self.epochs:g}], Step [{update}/{per_epoch}], Loss: {loss:.4f}"

    def _update(self, position: int) -> tuple[int, int]:
        """(epoch from 0, update of it from 1) that ended at this position."""
        epoch, place = divmod(position - 1, self.num_samples)
        return epoch, math.ceil((place + 1) / self.update_size)


class TestSet(Classification):
    """The test images, with the tutorial's line."""

    epochs = 0.0

    def lines(self, step, epoch, values, best) -> list[str]:
        share = f"{values['test/accuracy']:.2%}".replace("%", " %")
        counts = f"({self.num_correct:,} of {len(self.source):,})"
        return [f"Epoch [{math.ceil(epoch)}/{self.epochs:g}], Test accuracy: {share} {counts}"]


class _Saver(checkpoint.Saver):
    """Writes an Apex file with every checkpoint, where --save-amp asks for it."""

    amp: tuple[Path | None, TorchBackbone]

    def begin(self, snapshot: Snapshot, since: float | None = None) -> None:
        super().begin(snapshot, since)
        path, backbone = self.amp
        if path and snapshot.rank == 0:
            scaler = backbone.scaler
            state = (scaler.scale, scaler.clean_steps) if scaler else (1.0, 0)
            apex.write(path, snapshot.backbone, backbone.optimizer, *state)


def _source(config: Config, split: Split) -> IdxSource:
    source = IdxSource(config.mnist.data_dir, split, NUM_CLASSES)
    if source.image_NHW.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"{config.mnist.data_dir}: the {split} images have {' x '.join(map(str, source.image_NHW.shape[1:]))} "
            f"pixels; the ConvNet takes {SIDE} x {SIDE} only"
        )
    return source


def _load_amp(run: Run, backbone: TorchBackbone, path: Path, resumed: bool) -> None:
    """Starts from an Apex checkpoint, unless the run goes on from one of its own. A collective."""
    if resumed:
        run.note(f"--load-amp {path} is for a new run; this one goes on from its own checkpoint")
        return
    found = apex.read(path)
    check_fits(found.model, backbone.weights.state_dict(), path, "ConvNet")
    backbone.weights.load_state_dict(found.model)
    for note in apex.load_optimizer(found, backbone.optimizer):
        run.note(note)
    scaler = backbone.scaler
    if scaler and found.loss_scale != 1:
        clean = found.unskipped if found.unskipped < LossScaler.GROWTH_INTERVAL else 0
        scaler.load_state({"scale": found.loss_scale, "clean_steps": clean})
    elif scaler or found.loss_scale != 1:
        run.note(
            f"{path} has loss scale {found.loss_scale:g}; this run, --precision {backbone.precision.mode}, has "
            f"{f'{scaler.scale:g}' if scaler else 'none'}"
        )
    run.logger.info(f"started from {path}")
    check_replicas(backbone.replicated(), run.world)


def _results(test: TestSet, values: dict[str, float], best: dict[str, float]) -> dict[str, object]:
    assert test.confusion_CC is not None
    return {
        "test_accuracy": values["test/accuracy"],
        "best_test_accuracy": best["test"],
        # Of each label: how often it was taken for what.
        "confusion": test.confusion_CC.tolist(),
    }


def parse(arguments: list[str]) -> Config:
    """The command line -> configuration. Raises ValueError for values that make no sense, alone or together."""
    return tyro.cli(Config, args=arguments, prog="train.py mnist")
