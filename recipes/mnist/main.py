"""The PyTorch tutorial's job: a small ConvNet on MNIST's files, data parallel, in mixed precision if wanted.

    python train.py mnist --data-dir DIR                                           one process
    python train.py mnist --nodes 1 --gpus 2 --epochs 5                            two, started by this command
    python train.py mnist --nodes 2 --gpus 2 --nr 1 --master-addr ip1              on the second of two machines
    horovodrun -np 2 -H localhost:2 python train.py mnist --precision fp16-o2      the tutorial's Apex folder
    python train.py mnist --engine mxnet --network lenet                           MXNet's job: recipes/mxnet

No MNIST here? `python -m demo digits --out data` writes real digits to train on. Results: docs/recipes/mnist.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from partial_fc import flags, recipe_table
from partial_fc.data.idx import IdxSource, Split
from partial_fc.flags import ExchangeFlags, Flags, GuardFlags, LaunchFlags, OptimFlags, RunFlags, ScheduleFlags
from partial_fc.flags.facts import Basic, In, MayChange, Shows
from partial_fc.recipe import start

# Parts that need torch are imported after the flags are checked: torch takes seconds, which --help avoids.
if TYPE_CHECKING:
    from partial_fc.train.run import Run

# The tutorial's Apex folder.
_ELSEWHERE = {
    "opt-level": "O1 is --precision fp16 (or bf16), O2 --precision fp16-o2, O0 --precision fp32",
    "loss-scale": "fp16's is found while training: --precision fp16",
    "keep-batchnorm-fp32": "batch norms always compute in fp32",
}


@dataclass(frozen=True, kw_only=True)
class MnistFlags:
    """The training data, and files of other programs."""

    data_dir: Annotated[Path, Basic, MayChange] = Path("data")
    """Folder of MNIST's four files, compressed or not; also in its MNIST/raw. Nothing is downloaded:
    `python -m demo digits --out DIR` writes a small set of real digits."""
    n_workers: Annotated[int, In("[0, 4096]"), MayChange] = 0
    """Loader threads of each process; 0: the training thread reads."""
    engine: Annotated[Literal["torch", "mxnet"], Basic] = "torch"
    """The engine. mxnet: another job with its own flags, MXNet's train_mnist.py over a key-value store; `--engine mxnet
    --help` lists them."""
    load_amp: Annotated[Path | None, Basic, MayChange] = None
    """Start from an Apex checkpoint ({'model', 'optimizer', 'amp'}): weights, momentum, loss scale."""
    save_amp: Annotated[Path | None, Basic, MayChange] = None
    """Write one with every checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains the PyTorch tutorial's ConvNet on MNIST files. Defaults are the tutorial's. It is evaluated and saved
    after each epoch."""

    mnist: Flags[MnistFlags] = MnistFlags()
    optim: Annotated[Flags[OptimFlags], Shows(("momentum", "weight_decay"))] = OptimFlags(
        batch_size=100, momentum=0.0, weight_decay=0.0
    )
    schedule: Annotated[Flags[ScheduleFlags], Shows(("lr_scheduler",))] = ScheduleFlags(
        lr=1e-4, lr_scaling="none", lr_scheduler="constant", epochs=2.0
    )
    run: Annotated[Flags[RunFlags], Shows(("seed",))] = RunFlags(
        models_root=Path("runs/mnist-DATA-NETWORK"),
        frequent=100,
        verbose=0,
        checkpoint_every=0,
        keep_checkpoints=2,
        save_best=False,
    )
    guards: Flags[GuardFlags] = GuardFlags()
    exchange: Flags[ExchangeFlags] = ExchangeFlags()
    launch: Annotated[Flags[LaunchFlags], Shows(("nodes", "nr", "master_addr", "device"))] = LaunchFlags()

    def __post_init__(self) -> None:
        load, save = self.mnist.load_amp, self.mnist.save_amp
        if save is not None and self.optim.precision == "fp64":
            raise ValueError("--save-amp with --precision fp64: Apex's files hold fp32 weights")
        if load is not None and self.run.resume not in flags.NO_CHECKPOINT:
            raise ValueError(f"--load-amp {load} and --resume {self.run.resume} exclude each other; give one of them")


def main(arguments: list[str]) -> int:
    """Runs the recipe; returns the exit status."""
    of_key_value_store = recipe_table.module("mxnet.kvstore_job")  # MXNet's job, with its own flags
    if of_key_value_store.asked_for(arguments):
        return of_key_value_store.start(arguments)
    config = parse(arguments)
    return start("mnist", train_here, config, called=(config.mnist.data_dir, "convnet"), bare=True)


def train_here(run: Run) -> int:
    """Builds the parts, trains, writes the results."""
    import torch

    from partial_fc.data.order import PerEpoch
    from partial_fc.data.transform import as_stored
    from partial_fc.head import CrossEntropy
    from partial_fc.models.inputs import MNIST

    from .convnet import NUM_CLASSES, ConvNet
    from .epochs import ApexFile, TestSet, TutorialLine, load_amp

    config = run.config

    # ---- data
    train_source = run.open_data(lambda: _source(config, "train"))
    test = TestSet(_source(config, "t10k"), config.schedule.epochs)
    order = PerEpoch(len(train_source), config.run.seed)
    run.lengths(order)
    updates = math.ceil(len(train_source) / run.global_batch)
    if updates < config.run.frequent:
        run.note(f"no Step lines: an epoch has {updates} updates, fewer than --frequent {config.run.frequent}")
    loader = run.loader(train_source, as_stored, order, num_workers=config.mnist.n_workers)

    # ---- model
    torch.manual_seed(config.run.seed)  # as the tutorial: its first weights
    backbone = run.backbone(ConvNet(), MNIST, {"network": "convnet", "output": "float32 (N, 10), logits"})
    head = CrossEntropy(NUM_CLASSES, run.world, backbone.precision.parameter_dtype)

    # ---- a given checkpoint, else this run's newest, else --load-amp, else from scratch
    load, save = config.mnist.load_amp, config.mnist.save_amp
    line = partial(TutorialLine, update_size=run.global_batch, epochs=config.schedule.epochs)
    status = run.train(backbone, head, loader, [test], hooks=ApexFile(save, backbone) if save else None, line=line,
                       start_from=partial(load_amp, run, backbone, load) if load else None, results=test.results,
                       each_epoch=True)  # fmt: skip
    if run.outcome and not run.outcome.stopped:
        run.logger.info(f"Training complete in: {timedelta(seconds=run.seconds)}")
    return status


def _source(config: Config, split: Split) -> IdxSource:
    from .convnet import NUM_CLASSES, SIDE

    source = IdxSource(config.mnist.data_dir, split, NUM_CLASSES)
    if source.image_NHW.shape[1:] != (SIDE, SIDE):
        raise ValueError(
            f"{config.mnist.data_dir}: the {split} images have {' x '.join(map(str, source.image_NHW.shape[1:]))} "
            f"pixels; the ConvNet takes {SIDE} x {SIDE} only"
        )
    return source


@flags.told_as_usage
def parse(arguments: list[str]) -> Config:
    """Parses the command line: configuration. Raises ValueError for invalid values or combinations."""
    return flags.parse(Config, arguments, f"{flags.trainer()} mnist", elsewhere=_ELSEWHERE)
