"""The flags that say how a run is started, and on what; every recipe has them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from partial_fc.flags.facts import Basic, In, may_change
from partial_fc.flags.numbers import PORT, PROCESSES, THREADS, check_numbers


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
    """Where hosts have several networks, the one between them, for example eth0 (`ip addr` lists them). none: what
    the launcher or the environment says, else that of the host's own address."""
    secret_file: Path | None = None
    """A file that only you may read (mode 600), with the same 16 or more characters on all hosts: who does not know
    them does not get in where the processes meet (--nodes, srun; SECURITY.md). On one host, and with --num-shards and
    `partial-fc launch`, they have a secret without it."""
    comm_timeout: float = 600.0
    """Seconds that an exchange between the processes may take before it is reported as hung and the run ends; 0: for
    ever."""
    start_timeout: Annotated[float, In("(0, inf)")] = 120.0
    """Seconds in which all processes must have found each other. (horovodrun has a --start-timeout of its own; where
    hosts come and go this is the one.)"""
    restarts: Annotated[int, In("[0, 1000000]")] = 0
    """So many times at most, where a process fails or is killed, all go on from the newest checkpoint: each is started
    again at once, in place, with its libraries loaded. Not where five tries bring no step beyond the furthest, nor what
    fails before its first step. With --gpus, --nodes, `partial-fc launch`, srun, and horovodrun where hosts come and go
    (there from a commit in memory); mpirun has `run.sh --restarts`, torchrun --max-restarts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: one GPU for each process where there is one."""
    deterministic: bool = False
    """Only GPU algorithms that repeat bit by bit, and no messages that Horovod joins by chance (slower)."""

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
