"""The launch of this process, read from the environment."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from partial_fc.comm.launch import ONE_A_HOST, Launch, integer, slurm
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
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
# launcher -> (backend, the variables that it sets: those of _IDENTITY, and what else must be set)
_LAUNCHERS: dict[str, tuple[Literal["horovod", "torch"], tuple[str, ...], tuple[str, ...]]] = {
    "horovodrun": ("horovod", tuple(f"HOROVOD_{name}" for name in _IDENTITY), ("HOROVOD_CONTROLLER",)),
    "mpirun (Open MPI)": ("horovod", tuple(f"OMPI_COMM_WORLD_{name}" for name in _IDENTITY), ()),
    "mpirun (MPICH, Intel MPI)": ("horovod", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ()),
    "mpiexec (PALS)": ("horovod", ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"), ()),
    "torchrun": ("torch", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), _MASTER),
    "deepspeed": ("torch", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"), _MASTER),
    "mpirun_rsh (MVAPICH)": ("torch", tuple(f"MV2_COMM_WORLD_{name}" for name in _IDENTITY), _MASTER),
    "jsrun": ("torch", tuple(f"JSM_NAMESPACE_{name}" for name in _IDENTITY), _MASTER),
    "flux run": ("torch", ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "LOCAL_WORLD_SIZE"), _MASTER),
}
# A size's variable -> who sets it. These start the command on each host, the next may start it once, the last may have
# started torchrun several times.
_COPIES = {"PET_NNODES": "Kubeflow", "SM_HOSTS": "SageMaker", "CLUSTER_SPEC": "Vertex AI", "TF_CONFIG": "the cluster"}
_GIVEN = {"SLURM_NTASKS": "SLURM", "SLURM_JOB_NUM_NODES": "SLURM", "LSB_MCPU_HOSTS": "LSF", "PBS_NODEFILE": "PBS"}
_GIVEN |= {"NHOSTS": "Grid Engine", "AZUREML_NODE_COUNT": "Azure ML", "PET_NPROC_PER_NODE": "Kubeflow"}
_GIVEN |= {"SKYPILOT_NUM_NODES": "SkyPilot", "DSTACK_NODES_NUM": "dstack", "LWS_GROUP_SIZE": "LeaderWorkerSet"}
_OUTER = {names[1]: name for name, (_, names, _) in _LAUNCHERS.items()} | {"SLURM_STEP_NUM_TASKS": "srun"}


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """Returns the launch of the first launcher in the table that has set all its variables (torchrun is the first if it
    has started this process: mpirun may have started torchrun), else srun's. An empty variable counts as not set.

    Raises ValueError if a launcher has set a part, unless its size is 1 or srun's: all would train apart, or hang.
    """
    given = {name: value for name, value in environ.items() if value}
    environ = _one_a_host(given) | given
    is_inner = any(name in given for name in ("TORCHELASTIC_RUN_ID", PARENT, LAUNCHER))
    for launcher in sorted(_LAUNCHERS, key=lambda name: is_inner and name != "torchrun"):
        backend, identity, more = _LAUNCHERS[launcher]
        if any(name not in environ for name in (*identity, *more)):
            continue
        numbers = [integer(name, environ[name]) for name in identity]
        launch = Launch(backend, numbers[0], numbers[1], numbers[2], numbers[3], launcher)
        if launcher == "torchrun":
            launcher = launcher if "LOCAL_RANK" in given else ONE_A_HOST
            launcher = "--nodes and --gpus" if started_here(environ) else environ.get(LAUNCHER, launcher)
        if backend == "torch":
            port = integer("MASTER_PORT", environ["MASTER_PORT"])
            launch = replace(launch, launcher=launcher, master_addr=environ["MASTER_ADDR"], master_port=port)
        return _checked(launch)
    srun = _checked(slurm.task(given))
    for launcher, (_, identity, more) in _LAUNCHERS.items():
        rank, size = (environ.get(name) for name in identity[:2])
        same = srun.size > 1 and rank in (None, str(srun.rank)) and size == str(srun.size)
        if (rank or size) and size != "1" and not same:
            present = [f"{name}={environ[name]}" for name in (*identity, *more) if name in environ]
            missing = [name for name in (*identity, *more) if name not in environ]
            raise ValueError(
                f"launched as if by {launcher} ({', '.join(present)}) but {', '.join(missing)} is not set; start with "
                f"{'srun' if 'SLURM_JOB_ID' in given else launcher.split()[0]}, set all (MASTER_ADDR: the host of rank "
                "0; LOCAL_RANK=0 LOCAL_WORLD_SIZE=1: one process a host), or unset these variables to run one process"
            )
    return srun


def left_over(launch: Launch) -> str:
    """Returns what to do if no launcher runs, but its variables are set; "" for our own launchers."""
    _, identity, more = _LAUNCHERS.get(launch.launcher.replace(ONE_A_HOST, "torchrun"), ("", ("SLURM_STEP_ID",), ()))
    names = " ".join(name for name in (*identity, *more) if os.environ.get(name))
    return f" If no launcher has started this process, its variables are left over: unset {names}" if names else ""


def expect(launch: Launch, server: str, host: str, port: int) -> None:
    """Raises StartError if nobody listens where the launcher's server must listen since before this process."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError as error:
        raise StartError(f"{launch}: no {server} at {host}:{port} ({error}).{left_over(launch)}") from None


def unused(launch: Launch, nodes: int = 1, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns a line for each size of a launcher or queue that is above the one in use. nodes: the hosts of the flags.
    Raises ValueError if this is one of several processes that would each train alone."""
    alone = launch.backend == "single"
    used = max(nodes, integer("GROUP_WORLD_SIZE", environ.get("GROUP_WORLD_SIZE") or str(launch.size)))
    # In a shell of SLURM, PBS or LSF, or in a task of srun, one process is meant.
    by_hand = environ.get("PBS_ENVIRONMENT") == "PBS_INTERACTIVE" or "LSB_INTERACTIVE" in environ
    if "SLURM_JOB_ID" in environ:
        by_hand = environ.get("ENVIRONMENT") != "BATCH" or bool(environ.get("SLURM_STEP_ID"))
    lines = []
    for variable, by in (_COPIES | (_OUTER if not alone else {} if by_hand else _GIVEN)).items():
        if (size := _size(environ.get(variable, ""))) > used and variable != "WORLD_SIZE":
            start = "srun" if by == "SLURM" else "torchrun (on each host) or mpirun, in place of python"
            lines.append(f"note: {variable} of {by} says {size}, this run uses {used}: to use all, start with {start}")
            if alone and variable in _COPIES:
                raise ValueError(f"{lines[-1][6:]}. Each would train for itself; if that is meant, unset {variable}")
    return lines


def _size(text: str) -> int:
    """Returns the number in a text: 4, 1:4, "host1 4 host2 4", a file of hosts, a list or a cluster in JSON."""
    with suppress(OSError, ValueError, AttributeError, TypeError):
        if text.startswith("/"):
            return len(set(Path(text).read_text().split()))
        if not text.startswith(("{", "[")):
            return len(text.split()) // 2 if " " in text else max(map(int, text.split(":")))
        value = json.loads(text)
        cluster = value.get("cluster", {}) if isinstance(value, dict) else {"worker": value}
        return sum(len(cluster.get(name, ())) for name in ("chief", "master", "worker", "workerpool0", "workerpool1"))
    return 1


def _one_a_host(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the LOCAL_* that launchers leave out: Kubernetes' operators and Vertex AI mean one process a host. (Where
    PET_NPROC_PER_NODE asks for more, Kubeflow's RANK is that of a host, for torchrun.) Azure ML gives the hosts."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ or slurm.in_step(environ):
        return {}
    if hosts := environ.get("AZUREML_NODE_COUNT"):
        return {"LOCAL_WORLD_SIZE": str(integer("WORLD_SIZE", environ["WORLD_SIZE"]) // max(1, int(hosts)))}
    counts = {environ.get(name, "1") for name in ("LOCAL_WORLD_SIZE", "PET_NPROC_PER_NODE")}
    several = "LOCAL_RANK" in environ or not counts <= {"1", "auto", "cpu", "gpu"}
    return {} if several else {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def started_here(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether our own --nodes and --gpus started this process."""
    return bool(environ.get(PARENT))


def processes_here(gpus: int) -> int:
    """Returns the number of processes on this machine: those of a launcher, else `gpus`, which are yet to start."""
    started = detect()
    return gpus if started.backend == "single" or started.is_host else started.local_size


def has_agent(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether torchrun hosts torch.distributed's store."""
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
