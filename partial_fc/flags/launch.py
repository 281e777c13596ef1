"""The flags of a run's start and devices, which every recipe has."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from partial_fc.flags.facts import PORT, PROCESSES, THREADS, Basic, In, check_numbers, may_change


@may_change
@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """How the processes are started and find each other. horovodrun, mpirun, torchrun and srun need none of these;
    without them --gpus (and --nodes) start the processes."""

    nodes: Annotated[int, tyro.conf.arg(aliases=["-n"]), In(PROCESSES)] = 1
    """Hosts of the run. Give the same command on each, with its own --nr."""
    gpus: Annotated[int, tyro.conf.arg(aliases=["-g"]), In(THREADS), Basic] = 1
    """Processes to start on this host, one for each GPU; on the CPU where there is none."""
    nr: Annotated[int, tyro.conf.arg(aliases=["-nr"])] = 0
    """Number of this host among --nodes, from 0."""
    master_addr: str | None = None
    """Address of the host with --nr 0, as the others reach it; needed for more than one node."""
    master_port: Annotated[int | None, In(PORT)] = None
    """A free port of that host, the same on all nodes. none: 8888; on a single node whichever is free."""
    network_interface: str | None = None
    """The network between the hosts, if they have several, for example eth0 (`ip addr` lists them). none: the
    launcher's or the environment's, else that of the host's own address."""
    comm_timeout: float = 600.0
    """Seconds that a collective may take before it is reported as hanging and the run ends; 0: no limit."""
    start_timeout: Annotated[float, In("(0, inf)")] = 120.0
    """Seconds in which all processes must join. (horovodrun has its own --start-timeout.)"""
    restarts: Annotated[int, In("[0, 1000000]")] = 0
    """The most restarts after a process fails or is killed: all processes are started again at once, and resume from
    the newest checkpoint. No restart after five without a new step, or after a failure before the first step. With
    --gpus, --nodes, `partial-fc launch` and srun; mpirun has `run.sh --restarts`, torchrun --max-restarts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: one GPU for each process where there is one."""
    deterministic: bool = False
    """Only deterministic GPU algorithms, and no fused messages in Horovod (slower)."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0 <= self.nr < self.nodes:
            raise ValueError(
                f"--nr is {self.nr}, of --nodes {self.nodes}; nodes are numbered from 0 to {self.nodes - 1}"
            )
        if self.nodes > 1 and self.master_addr is None:
            raise ValueError(
                f"--nodes {self.nodes} needs --master-addr: the address of the host with --nr 0, as the others reach "
                "it, for example --master-addr 10.0.0.1 (`ip addr` there shows it); the same on all nodes"
            )
