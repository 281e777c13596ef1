"""What recipes ask of the machine that they run on."""

import os
import platform
from importlib import metadata
from typing import Literal

import torch

from partial_fc import __version__
from partial_fc.comm import World

_PACKAGES = ("torch", "horovod", "numpy", "opencv-python-headless", "safetensors")


def device_type(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """auto: GPUs where there are any. Raises ValueError where they are asked for and there is none."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ValueError("--device cuda: torch finds no GPU here (see `nvidia-smi`, and torch's CUDA build)")
    return "cuda" if available and asked != "cpu" else "cpu"


def own_device(kind: Literal["cpu", "cuda"], world: World) -> torch.device:
    """This process's: each has a GPU of its host for itself. Raises ValueError where there are fewer."""
    if kind == "cpu":
        return torch.device("cpu")
    if world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"{world}: local rank {world.local_rank} but {torch.cuda.device_count()} GPU(s) on this host; start as "
            "many processes a host as it has GPUs, or look at CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def share_cores(world: World) -> None:
    """The processes of a host share its cores. Threads of several that all want every core wait for each other: steps
    then take fifty times as long. config.sh and torchrun set OMP_NUM_THREADS; whoever sets it is left alone."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))


def repeat_bit_by_bit() -> None:
    """Only algorithms whose results repeat: on GPUs some others are faster. To be called before the processes join."""
    # Horovod sends together what is ready together; with three processes or more the order of a sum depends on that.
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may not repeat itself
    torch.use_deterministic_algorithms(True)


def versions() -> dict[str, str]:
    """Of what a run's numbers depend on."""
    found = {"partial-fc": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
