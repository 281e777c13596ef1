"""The launch of this process, read from the environment."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from partial_fc.comm.launch import Launch, integer, slurm
from partial_fc.comm.watch.report import ranks_in_words

# Set in the processes that spawn.py starts: the process id of their parent.
PARENT = "PARTIAL_FC_PARENT"
# In their rank 0, the number of a socket that listens already, so that the port cannot be taken meanwhile.
LISTENING_SOCKET = "PARTIAL_FC_LISTENING_SOCKET"
# Set by `partial-fc launch`: its own name.
LAUNCHER = "PARTIAL_FC_LAUNCHER"
MPI_YIELD = "OMPI_MCA_mpi_yield_when_idle"


class StartError(ConnectionError):
    """The processes of a launch did not find each other, or do not fit together."""


_IDENTITY = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
# launcher -> (backend, the variables that it sets: those of _IDENTITY, and what else it must set)
_LAUNCHERS: dict[str, tuple[Literal["horovod", "torch"], tuple[str, ...], tuple[str, ...]]] = {
    "horovodrun": ("horovod", tuple(f"HOROVOD_{name}" for name in _IDENTITY), ("HOROVOD_CONTROLLER",)),
    "mpirun (Open MPI)": ("horovod", tuple(f"OMPI_COMM_WORLD_{name}" for name in _IDENTITY), ()),
    "mpirun (MPICH, Intel MPI)": ("horovod", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ()),
    "torchrun": ("torch", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("MASTER_ADDR", "MASTER_PORT")),
}


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """Returns the launch of the first launcher in the table whose rank or size is set; then all its variables must be.
    If there is none, srun's are read (srun comes last because the others also run inside SLURM's steps).

    Raises ValueError with the missing variables: otherwise W processes would train separate models, or hang.
    """
    for launcher, (backend, identity, more) in _LAUNCHERS.items():
        if not any(name in environ for name in identity[:2]):
            continue
        if identity[0] == "PMI_RANK" and slurm.in_step(environ) and "MPI_LOCALRANKID" not in environ:
            continue  # srun also sets PMI_RANK, for MPI programs (--mpi=pmi2, on some clusters the default)
        missing = [name for name in (*identity, *more) if not environ.get(name)]
        if missing:
            present = [f"{name}={environ[name]}" for name in (*identity, *more) if environ.get(name)]
            raise ValueError(
                f"launched as if by {launcher} ({', '.join(present)}) but {', '.join(missing)} "
                f"is not set; start through {launcher.split()[0]}, or unset these variables to run one process"
            )
        rank, size, local_rank, local_size = (integer(name, environ[name]) for name in identity)
        launch = Launch(backend, rank, size, local_rank, local_size, launcher)
        if backend == "torch":
            launch = replace(
                launch,
                launcher="--nodes and --gpus" if started_here(environ) else environ.get(LAUNCHER, launcher),
                master_addr=environ["MASTER_ADDR"],
                master_port=integer("MASTER_PORT", environ["MASTER_PORT"]),
            )
        return _checked(launch)
    return _checked(slurm.task(environ))


def started_here(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether our own --nodes and --gpus started this process."""
    return bool(environ.get(PARENT))


def has_agent(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether torchrun hosts torch.distributed's store, which has no authentication."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def mpi_settings(launch: Launch, num_cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables to set before MPI starts in this process, if the processes fill a host's cores: MPI polls while
    it waits, and is to yield the core instead. num_cores: available to this process. The user's settings take
    precedence. (mpirun does the same if there are more processes than slots; it does not count threads.)"""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" not in environ or environ.get(MPI_YIELD):
        return {}
    # Without the variable, processes divide the cores; "4,2" is OpenMP's notation for nested threads.
    given = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    num_threads = integer("OMP_NUM_THREADS", given) if given else max(1, num_cores // launch.local_size)
    return {MPI_YIELD: "1"} if launch.local_size * num_threads >= num_cores else {}


def devices_differ(devices: Sequence[str]) -> str:
    """Returns an error if the ranks' kinds of device differ, else "". devices: "cpu" or "cuda", by rank."""
    without = [rank for rank, device in enumerate(devices) if device != "cuda"]
    if len(without) in (0, len(devices)):
        return ""
    return (
        f"{ranks_in_words(without)} of {len(devices)} would compute on the CPU, the others on GPUs. If their hosts "
        "have GPUs, `nvidia-smi` and CUDA_VISIBLE_DEVICES there say why torch finds none; or give --device cpu to all"
    )


def _checked(launch: Launch) -> Launch:
    if not (0 <= launch.rank < launch.size and 0 <= launch.local_rank < launch.local_size <= launch.size):
        raise ValueError(
            f"{launch.launcher} says rank {launch.rank} of {launch.size}, local rank {launch.local_rank} of "
            f"{launch.local_size}; expected 0 <= rank < size and 0 <= local rank < local size <= size"
        )
    if launch.backend == "torch" and not 0 < launch.master_port < 65536:
        raise ValueError(f"MASTER_PORT={launch.master_port}; expected a port between 1 and 65535")
    return launch
