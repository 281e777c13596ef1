"""The flags of `partial-fc plan`, `bench head` and `bench data`, without torch, so that help and mistakes cost no
seconds."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from partial_fc.flags.numbers import BATCH, CLASSES, PIXELS, PROCESSES, THREADS, check_numbers


@dataclass(frozen=True)
class PlanOptions:
    """Memory, traffic and time of a head, before anything is allocated. Rates are measured here (on one process, within
    a second) unless they are given."""

    classes: int
    """Classes over all processes."""
    dim: int = 512
    """Width of a feature."""
    gpus: int = 1
    """Processes: one for each GPU, or some on CPUs."""
    batch: int = 1024
    """Global batch."""
    memory: str | None = None
    """Memory that one process may use, e.g. 80GiB: how many classes fit?"""
    reserve: str = "0"
    """Part of --memory that is kept for the backbone's activations and the libraries."""
    sample_rate: float = 0.1
    """Share of the classes that are negatives in a step; compared with all of them."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Dtype of the centres."""
    state_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Dtype of the optimizer's state."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the matrix products' operands; auto: bf16 where the device multiplies such numbers itself (a GPU
    that is not here does, a CPU is taken to be this one), else fp32."""
    optimizer: Literal["sgd", "adamw", "adagrad", "adam"] = "sgd"
    """Optimizer of the centres."""
    place: Literal["device", "host", "disk"] = "device"
    """Where centres and state are kept."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the head; auto: a GPU if there is one here."""
    impl: Literal["auto", "plain", "cpu", "triton"] = "auto"
    """The kernel; auto: triton on GPUs, cpu on CPUs."""
    threads: int = 1
    """Threads of each process, on CPUs."""
    backbone_parameters: int = 0
    """Adds the backbone's parameters, gradient and optimizer state to the memory, and its all-reduce."""
    step_ms: float | None = None
    """Milliseconds of a step without the head: does sampling pay?"""
    images_per_s: float | None = None
    """The same as images a second of one process."""
    rates: Path | None = None
    """A file with the "rates" of another machine, as --json prints them."""
    tflops: float | None = None
    """Matrix products of --precision on one GPU, instead of what is measured."""
    bandwidth: float | None = None
    """GB/s of its memory, read plus written."""
    launch_us: float | None = None
    """Microseconds that the host takes to launch one operation, where --tflops describes the machine; none: 5."""
    place_bandwidth: float | None = None
    """GB/s each way between --place and the device; none: 50 for the host (PCIe 5), 2 for a disk."""
    link_gbps: float = 100.0
    """Gbit/s of one process's link, each way."""
    latency_us: float = 20.0
    """Microseconds that one message takes beside its bytes."""
    json: bool = False
    """One JSON object instead of the table."""

    def __post_init__(self) -> None:
        check_numbers(
            self,
            classes=CLASSES,
            dim="[1, 65536]",
            gpus=PROCESSES,
            batch="[1, 1000000000]",
            sample_rate="(0, 1]",
            threads=THREADS,
            step_ms="(0, inf)",
            images_per_s="(0, inf)",
            tflops="(0, inf)",
            bandwidth="(0, inf)",
            launch_us="(0, inf)",
            place_bandwidth="(0, inf)",
            link_gbps="(0, inf)",
        )

    @property
    def local_classes(self) -> int:
        from partial_fc.head.shard import Shard  # whose package imports torch

        return len(Shard.of(self.classes, 0, self.gpus))

    @property
    def is_elsewhere(self) -> bool:
        """Whether rows lie in the host's memory, beside a GPU, or in files."""
        return self.place == "disk" or (self.place == "host" and self.device == "cuda")

    @property
    def sampled(self) -> int:
        """S: the negatives, and the batch's classes of this rank."""
        if self.sample_rate == 1.0:
            return self.local_classes
        positives = math.ceil(self.batch / self.gpus)
        return min(self.local_classes, math.ceil(self.sample_rate * self.local_classes) + positives)


@dataclass(frozen=True)
class HeadOptions:
    """Trains the head on random features and prints a table. The defaults are what suits this machine, without
    emulating a number format: it says what that is, and how recipe face is told to train so."""

    classes: int = 1_000_000
    """Classes over all processes."""
    sample_rate: float = 1.0
    """Share of the classes that are negatives in a step."""
    batch: int = 128
    """Global batch."""
    dim: int = 512
    """Width of a feature."""
    num_processes: Annotated[int, tyro.conf.arg(name="np")] = 2
    """Processes on this machine; with --device cuda each takes a GPU."""
    threads: int = 1
    """Threads of each process."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the head computes."""
    impl: Literal["auto", "plain", "cpu", "triton"] = "auto"
    """The kernel; auto: the fastest that this machine has."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the matrix products' operands, as in PartialFC; auto: bf16 where this machine multiplies such
    numbers itself, else fp32. Sums are float32 either way."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of this head's centres; auto: that of the operands. bf16 halves the memory either way. (Recipe face: fp32
    without --centre-dtype.)"""
    state_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Dtype of this head's optimizer state; same: as the centres'."""
    optimizer: Literal["sgd", "adamw", "adagrad", "adam"] = "sgd"
    """Optimizer of the centres, on the active rows; adagrad and adam have one second moment a row."""
    place: Literal["device", "host", "disk"] = "device"
    """Where this head's centres and state are kept."""
    path: Path | None = None
    """Folder of the files of --place disk; none: a temporary one."""
    fresh: bool = False
    """Rows are created when they first take part, as in the first steps of a run. Else all of them are created before,
    as later on: then every row takes memory."""
    steps: int = 3
    """Timed steps, after one that is not; the median counts."""
    versus: tuple[Literal["plain", "torch", "insightface-style"], ...] = ()
    """In turn with others. plain: what people write themselves in PyTorch (normalise, CosFace, cross_entropy, SGD).
    torch: F.linear_cross_entropy of torch 2.13 and SGD, without margin and without normalised centres, for which it has
    no place. Both know nothing of processes: with --np above 1 each trains its own share of the classes and exchanges
    nothing, a lower bound of their time; --np 1 is exact. insightface-style: the sharded head as users of InsightFace
    run it. A side whose rows differ from this head's by more than 2 % is not compared."""
    versus_precision: Literal["same", "fp32", "bf16"] = "same"
    """Precision of the other sides' operands; same: as this head's."""
    versus_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the other sides' centres and momentum. bf16 is for comparing time and memory: torch.optim.SGD rounds to
    nearest, so that small updates are lost."""
    rounds: int = 3
    """Rounds with --versus: each side runs once in each; the median, the smallest and the largest ratio are said."""
    json: bool = False
    """One line for programs instead of the table."""

    def __post_init__(self) -> None:
        check_numbers(
            self,
            classes=CLASSES,
            sample_rate="(0, 1]",
            batch=BATCH,
            dim="[1, 65536]",
            num_processes=THREADS,
            threads=THREADS,
            steps=1,
            rounds=1,
        )


@dataclass(frozen=True)
class DataOptions:
    """Reads and decodes images of a training set in several ways, and prints a table."""

    source: Annotated[Path | None, tyro.conf.Positional] = None
    """A folder with train.rec, a .rec file, a folder of class folders, or a list. Or else:"""
    rec: Path | None = None
    """The same, by recipe face's name for it."""
    train_data: Path | None = None
    """An image database, as recipe imagenet takes it."""
    train_list: Path | None = None
    """A list of videos, as recipe kinetics takes it."""
    data_dir: Path = Path()
    """What the paths of --train-list are relative to."""
    rawframes: bool = False
    """They are folders of frames."""
    image_size: int | None = None
    """Pixels of a side, as the network takes them; none: 112, of a database 227, of videos 224."""
    resize: int = 256
    """The shorter side of a database's images before the crop; the height that frames of videos are made, whose width
    is made 340/256 of it."""
    mirror: bool = True
    """Exchange left and right every second time."""
    images: int | None = None
    """So many of the set, in shuffled order, in each round; none: 4000, or 64 videos."""
    batch_size: int | None = None
    """Images of a batch; none: 64, of videos 2."""
    threads: int = len(os.sched_getaffinity(0))
    """The loader runs with 1, 2, 4, ... up to so many."""
    rounds: int = 5
    """The median counts."""
    json: bool = False
    """One line for programs instead of the table."""

    def __post_init__(self) -> None:
        check_numbers(self, image_size=PIXELS, resize=PIXELS, images=1, batch_size=BATCH, threads=THREADS, rounds=1)
