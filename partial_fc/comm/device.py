"""The device, CPU cores and numerical settings of this process."""

import os
import platform
import socket
from collections import Counter
from fractions import Fraction
from importlib import metadata
from typing import Literal

import torch

from partial_fc import __version__, comm, memory
from partial_fc.comm import World
from partial_fc.comm.launch import ONE_A_HOST, start
from partial_fc.flags import LaunchFlags, is_given

_PACKAGES = ("torch", "horovod", "numpy", "opencv-python-headless", "safetensors")


def join(launch: LaunchFlags) -> tuple[World, torch.device]:
    """Starts this host's processes if the flags ask for them, and exits with their status; in each, calls `meet`."""
    status = start.start(launch)
    if status is not None:
        raise SystemExit(status)
    return meet(launch)


def meet(launch: LaunchFlags) -> tuple[World, torch.device]:
    """Returns this process's world and device, and shares the host's cores. All ranks call this."""
    if launch.deterministic:
        # Before the processes join. Slower on GPUs. Horovod fuses tensors that are ready together; with three processes
        # or more, fusion changes the order of a sum.
        os.environ["HOROVOD_FUSION_THRESHOLD"] = "0"
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic
        torch.use_deterministic_algorithms(True)
    kind = device_type(launch.device)
    if kind == "cpu":
        memory.keep_freed()
    elif comm.detect().launcher == ONE_A_HOST and torch.cuda.device_count() > 1 and not is_given(launch, "gpus"):
        raise ValueError("RANK without LOCAL_RANK, and several GPUs: give --gpus N for N processes on each host")
    world = start.join(launch, kind)
    device = local_device(kind, world)
    share_cores(world)
    return world, device


def device_type(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Returns the device type; auto: "cuda" if this host has a GPU (`comm.init` refuses ranks that differ). Raises
    ValueError if GPUs are asked for and there is none."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise ValueError("--device cuda: torch finds no GPU here (see `nvidia-smi`, and torch's CUDA build)")
    return "cuda" if available and asked != "cpu" else "cpu"


def local_device(kind: Literal["cpu", "cuda"], world: World) -> torch.device:
    """Returns this rank's device, on GPUs one of its own. Raises ValueError if the host has fewer GPUs than ranks."""
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
    """Sets torch's number of threads to this process's cores. Several threads on one core wait for each other: steps
    take fifty times as long. OMP_NUM_THREADS, which config.sh and torchrun set, takes precedence. All ranks call this.
    """
    cores = cores_of(world)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, int(cores)))


def cores_of(world: World) -> float:
    """Returns this process's cores, of those that other ranks may use too its share, and at most its share of what the
    cgroup allows. srun and mpirun may give each process cores of its own; the processes of a container share all its
    cores. All ranks call this."""
    host, mine = socket.gethostname(), os.sched_getaffinity(0)
    everybodys = comm.all_gather_json([host, *mine], world, "machine/cores")
    here = [cores for name, *cores in everybodys if name == host]
    num_users = Counter(core for cores in here for core in cores)
    share = sum(Fraction(1, num_users[core]) for core in mine)
    return float(min(share, memory.cores_allowed() / len(here)))


def decoding_threads(asked: int | Literal["auto"], world: World) -> int:
    """Returns --num-workers as a number; auto: this process's cores but one, from 1 to 16. All ranks call this."""
    return min(max(1, int(cores_of(world)) - 1), 16) if asked == "auto" else asked


def versions() -> dict[str, str]:
    """Returns the versions of what a run's results depend on."""
    found = {"partial-fc": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
