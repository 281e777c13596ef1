"""The flags of `partial-fc plan`."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from partial_fc.flags.facts import CLASSES, PROCESSES, THREADS, In


@dataclass(frozen=True)
class PlanOptions:
    """Memory, traffic and time of a head, before anything is allocated. Rates are measured here (on one process, within
    a second) unless they are given. Of several heads each is planned by itself."""

    classes: Annotated[int, In(CLASSES)]
    """Classes over all processes."""
    dim: Annotated[int, In("[1, 65536]")] = 512
    """Width of a feature."""
    gpus: Annotated[int, In(PROCESSES)] = 1
    """Processes: one for each GPU, or some on CPUs."""
    batch: Annotated[int, In("[1, 1000000000]")] = 1024
    """Global batch."""
    memory: str | None = None
    """Memory that one process may use, e.g. 80GiB: how many classes fit?"""
    reserve: str = "0"
    """Part of --memory that is kept for the backbone's activations and the libraries."""
    labels: Annotated[int, In("[1, 1000]")] = 1
    """Labels of a row in a step: --labels of the run, or its --labels-drawn."""
    sample_rate: Annotated[float, In("(0, 1]")] = 0.1
    """Share of the classes that are negatives in a step; compared with all of them."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Dtype of the centres."""
    state_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Dtype of the optimizer's state."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the matrix products' operands; auto: bf16 where the device multiplies such numbers itself (a GPU
    that is not here does, a CPU is taken to be this one), else fp32."""
    optimizer: Literal["sgd", "adamw", "adagrad"] = "sgd"
    """Optimizer of the centres."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the head; auto: a GPU if there is one here."""
    threads: Annotated[int, In(THREADS)] = 1
    """Threads of each process, on CPUs."""
    backbone_parameters: int = 0
    """Adds the backbone's parameters, gradient and optimizer state to the memory, and its all-reduce."""
    images_per_s: Annotated[float | None, In("(0, inf)")] = None
    """Images a second of one process without the head: does sampling pay?"""
    tflops: Annotated[float | None, In("(0, inf)")] = None
    """Matrix products of --precision on one GPU, instead of what is measured."""
    bandwidth: Annotated[float | None, In("(0, inf)")] = None
    """GB/s of its memory, read plus written."""
    link_gbps: Annotated[float, In("(0, inf)")] = 100.0
    """Gbit/s of one process's link, each way."""
    json: bool = False
    """One JSON object instead of the table."""

    @property
    def local_classes(self) -> int:
        from partial_fc.head.shard import Shard  # the package imports torch

        return len(Shard.of(self.classes, 0, self.gpus))

    @property
    def sampled(self) -> int:
        """S: the negatives, and the batch's classes on this rank."""
        if self.sample_rate == 1.0:
            return self.local_classes
        positives = math.ceil(self.batch * self.labels / self.gpus)
        return min(self.local_classes, math.ceil(self.sample_rate * self.local_classes) + positives)
