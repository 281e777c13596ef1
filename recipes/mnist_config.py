"""The command line of recipe `mnist`: one field, one flag, one help text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from recipes import compression
from recipes.launch_flags import LaunchFlags


@dataclass(frozen=True, kw_only=True)
class Config:
    """Trains the PyTorch tutorial's ConvNet on MNIST files. Defaults are the tutorial's."""

    launch: tyro.conf.OmitArgPrefixes[LaunchFlags] = LaunchFlags()

    # ---- data
    data_dir: Path = Path("data")
    """Folder of MNIST's four files, compressed or not; they may also lie in its MNIST/raw. Nothing is downloaded:
    `partial-fc data digits --out DIR` writes a small set of real digits."""
    n_workers: int = 0
    """Processes that read ahead, for each process that trains; 0: it reads itself."""

    # ---- optimisation
    engine: Literal["torch", "mxnet"] = "torch"
    """What computes. (mxnet is not there yet.)"""
    epochs: int = 2
    """Passes over the training images."""
    max_steps: int | None = None
    """Ends training after so many updates, if --epochs do not end it before."""
    batch_size: int = 100
    """Images of one process in one forward pass."""
    accumulate: int = 1
    """Batches of one update: what one batch of all their images would do, in the memory of one."""
    lr: float = 1e-4
    """Learning rate, whatever the number of processes."""
    momentum: float = 0.0
    """Of SGD."""
    sync_bn: bool = False
    """Batch-norm statistics over all processes: several then do what one does with the whole batch."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp16-o2", "fp64"] = "auto"
    """auto: bf16 where the hardware has it, else fp32. bf16, fp16: autocast, fp16 with a loss scale (Apex's O1).
    fp16-o2: float16 weights with fp32 masters and a loss scale (Apex's O2). fp64: for checks."""
    gradient_compression: Literal["none", "fp16", "bf16", "2bit", "powersgd"] = "none"
    """What gradients travel as. fp16, bf16: half the bytes; 2bit (as MXNet has it), powersgd: far fewer, what a step
    leaves out goes with the next ones."""
    compression_threshold: float | None = None
    """For 2bit: what a value is sent as, on the scale of a gradient summed over images; 0.5 when not given."""
    compression_rank: int | None = None
    """For powersgd: the rank of the matrices that are sent; 4 when not given."""
    seed: int = 0
    """Of the first weights and the order of the images."""
    deterministic: bool = False
    """Only GPU algorithms that repeat bit by bit (slower); the CPU's do anyway."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: one GPU for each process where there is one."""

    # ---- run
    frequent: int = 100
    """Updates between two lines, counted in each epoch."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint in --models-root, if any; never; or the DIR of a checkpoint."""
    desync_every: int = 500
    """Updates between two checks that all processes have the same weights, bit by bit; 0: never."""
    keep_checkpoints: int = 2
    """There is one after each epoch and at the end; older ones are removed."""
    load_amp: Path | None = None
    """Start from an Apex checkpoint ({'model', 'optimizer', 'amp'}): weights, momentum, loss scale."""
    save_amp: Path | None = None
    """Write one with every checkpoint."""
    models_root: Path = Path("runs/mnist")
    """Where everything is written: model, checkpoints, logs, TensorBoard, loss.csv, result.json, mistakes.png."""

    def __post_init__(self) -> None:
        if self.save_amp is not None and self.precision == "fp64":
            raise ValueError("--save-amp with --precision fp64: Apex's files hold fp32 weights")
        if self.engine == "mxnet":
            raise ValueError("--engine mxnet is not there yet: recipe mnist runs on PyTorch only, --engine torch")
        for name, least in (
            ("epochs", 1),
            ("batch_size", 1),
            ("accumulate", 1),
            ("frequent", 1),
            ("keep_checkpoints", 1),
            ("n_workers", 0),
            ("desync_every", 0),
            ("lr", 0),
        ):
            if not getattr(self, name) >= least:
                raise ValueError(f"{_flag(name)} is {getattr(self, name)}; expected at least {least}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"--max-steps is {self.max_steps}; expected at least 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"--momentum is {self.momentum}; expected 0 or more and less than 1")
        compression.check(self)
        if self.load_amp is not None and self.resume not in ("auto", "never"):
            raise ValueError(
                f"--load-amp {self.load_amp} and --resume {self.resume} both say where to start; give one of them"
            )


def parse(arguments: list[str]) -> Config:
    """The command line -> configuration. Raises ValueError for values that make no sense, alone or together."""
    return tyro.cli(Config, args=arguments, prog="train.py mnist")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
