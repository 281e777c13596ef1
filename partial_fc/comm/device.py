"""This process's place on its machine: its device, its share of the cores, what its results depend on."""

import hashlib
import os
import platform
import socket
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from importlib import metadata
from typing import Literal

import torch

from partial_fc import __version__, memory
from partial_fc.comm import World, elastic
from partial_fc.comm.launch import start
from partial_fc.flags import LaunchFlags

_PACKAGES = ("torch", "horovod", "numpy", "opencv-python-headless", "safetensors")


def join(launch: LaunchFlags) -> tuple[World, torch.device]:
    """Starts the processes of this host where the flags ask for them, and ends with their exit status; in one of those
    that compute, `meet`."""
    status = start.start(launch)
    if status is not None:
        raise SystemExit(status)
    return meet(launch)


def meet(launch: LaunchFlags) -> tuple[World, torch.device]:
    """This process's world, and its device, with the host's cores shared; with --restarts in a copy of it that trains,
    and this process ends with the status of the last copy. All ranks call this."""
    status = start.keep(launch)
    if status is not None:
        raise SystemExit(status)
    if launch.deterministic:
        if elastic.active():
            raise ValueError(
                "--deterministic under horovodrun with --host-discovery-script: the number of processes may change, "
                "and Horovod 0.28 crashes when ranks meet again with the HOROVOD_FUSION_THRESHOLD that this needs; "
                "leave one of the two out"
            )
        repeat_bit_by_bit()
    kind = device_type(launch.device)
    if kind == "cpu":
        memory.keep_freed()
    world = start.join(launch, kind)
    device = local_device(kind, world)
    share_cores(world)
    return world, device


def device_type(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """auto: GPUs where this host has any; `comm.init` refuses ranks that differ. Raises ValueError where they are asked
    for and there is none."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ValueError("--device cuda: torch finds no GPU here (see `nvidia-smi`, and torch's CUDA build)")
    return "cuda" if available and asked != "cpu" else "cpu"


def local_device(kind: Literal["cpu", "cuda"], world: World) -> torch.device:
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
    """As many threads as this process has cores; of those that other ranks may use as well, its share. Threads of
    several that all want every core wait for each other: steps then take fifty times as long. All ranks call this.

    srun and mpirun may have given each process cores of its own, a container cores that all its processes share: only
    the others know. config.sh and torchrun set OMP_NUM_THREADS; whoever sets it is left alone.
    """
    mine = cores(socket.gethostname(), os.sched_getaffinity(0))
    found = world.all_gather(torch.tensor(mine), name="machine/cores")
    num_users = Counter(map(tuple, found.tolist()))
    if "OMP_NUM_THREADS" not in os.environ:
        share = sum(Fraction(1, num_users[core]) for core in mine)
        torch.set_num_threads(max(1, int(share)))


def cores(host: str, numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(number made from the host's name, number of the core): what they are called among all hosts."""
    digest = hashlib.sha256(host.encode()).digest()
    return [(int.from_bytes(digest[:7]), number) for number in numbers]


def repeat_bit_by_bit() -> None:
    """Only algorithms whose results repeat: on GPUs some others are faster. To be called before the processes join."""
    # Horovod sends together what is ready together; with three processes or more the order of a sum depends on that.
    os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may not repeat itself
    torch.use_deterministic_algorithms(True)


def versions() -> dict[str, str]:
    """The versions of what a run's numbers depend on."""
    found = {"partial-fc": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
