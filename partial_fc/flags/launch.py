"""The flags that say how a run is started, and on what; every recipe has them."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from partial_fc import comm
from partial_fc.comm import World, elastic
from partial_fc.comm.launch import restart_agent, spawn
from partial_fc.findings import counted
from partial_fc.flags.facts import Basic, In, may_change
from partial_fc.flags.numbers import PORT, PROCESSES, THREADS, check_numbers, flag
from partial_fc.flags.training import is_given


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

    def start(self) -> int | None:
        """Starts the processes of this host where --nodes or --gpus ask for them, each with the command line of this
        process, and waits for their end.

        Returns the exit status to end with; none: this process is itself one of those that train. Raises ValueError
        where another launcher has started it already.
        """
        if comm.started_here():
            if not self.restarts:
                spawn.stay_with_parent()
            return None
        launch = comm.detect()
        static = launch.backend == "horovod" and not elastic.active()
        if self.restarts and (static or launch.launcher == "torchrun"):
            instead = "torchrun --max-restarts" if launch.backend == "torch" else "bash run.sh --restarts"
            raise ValueError(
                f"--restarts {self.restarts} under {launch.launcher}, which starts processes itself: use `{instead} N`"
            )
        if launch.launcher in spawn.LEAVES_BEHIND and not self.restarts:
            spawn.stay_with_parent()
        given = [name for name in ("nodes", "gpus", "nr", "master_addr", "master_port") if is_given(self, name)]
        flags = ", ".join(f"{flag(name)} {getattr(self, name)}" for name in given)
        if given == ["gpus"] and launch.is_host:
            return self._spawn(launch.size, launch.rank, launch.master_addr, launch.master_port)
        if given and launch.backend != "single":
            raise ValueError(
                f"{launch.launcher} has started this process as rank {launch.rank} of {launch.size}, and says itself "
                f"where the others are: leave {flags} away, or start without {launch.launcher}"
            )
        if self.nodes == self.gpus == 1:
            if given:
                print(f"note: {flags} without effect: one process, which needs no others", file=sys.stderr)
            return None
        port = self.master_port or (8888 if self.nodes > 1 else None)
        return self._spawn(self.nodes, self.nr, self.master_addr or "127.0.0.1", port)

    def _spawn(self, nodes: int, nr: int, master_addr: str, master_port: int | None) -> int:
        """Starts --gpus processes here, on host nr of so many. Returns their exit status."""
        print(f"starting {counted(self.gpus, 'process')}", file=sys.stderr, flush=True)
        return spawn.run(
            [sys.executable, *sys.orig_argv[1:]],
            nodes=nodes,
            gpus=self.gpus,
            nr=nr,
            master_addr=master_addr,
            master_port=master_port,
        )

    def keep(self) -> int | None:
        """With --restarts, in a process that is to train: makes it the keeper of those that do. Returns None in these,
        and in the keeper the exit status to end with. To be called when all is imported."""
        if not self.restarts:
            return None
        launch = comm.detect()
        if launch.backend == "horovod":
            importlib.import_module("partial_fc.comm.horovod")
        return restart_agent.keep(
            self.restarts, launch.rank, comm.started_here() or launch.launcher in spawn.LEAVES_BEHIND
        )

    def join(self, device_type: str) -> World:
        """The processes of this launch, met. device_type: "cpu" or "cuda"."""
        world = comm.init(
            device_type,
            comm_timeout_s=self.comm_timeout,
            start_timeout_s=self.start_timeout,
            network_interface=self.network_interface,
            secret_file=self.secret_file,
        )
        if world.rank == 0:
            self._tell(world)
        return world

    def _tell(self, world: World) -> None:
        import torch

        if world.backend == "torch" and world.size > 1 and not torch.cuda.is_available():
            print(f"no GPU here: {world.size} processes on the CPU, over gloo", flush=True)
        names = ("network_interface", "comm_timeout", "start_timeout", "secret_file")
        vain = {
            "single": dict.fromkeys(names, "one process"),
            "horovod": {
                "start_timeout": "" if elastic.active() else "Horovod's launcher has its own --start-timeout",
                "secret_file": "horovodrun makes a token of its own, mpirun asks for none",
            },
            "torch": {"secret_file": "torchrun keeps the store, and lets anybody in" if comm.has_agent() else ""},
        }
        for name, why in vain[world.backend].items():
            if why and is_given(self, name):
                print(f"note: {flag(name)} without effect: {why}", file=sys.stderr, flush=True)
