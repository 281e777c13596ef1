"""The start and join of a run's processes, by its flags: all that LaunchFlags cause.

    status = start(config.launch)         # here without another launcher: the processes of this host
    world = join(config.launch, "cpu")    # in a process that trains

A process that gets a status exits with it; None: it continues.
"""

import signal
import sys
from collections.abc import Callable
from typing import Any

from partial_fc import comm, interrupts
from partial_fc.comm import World
from partial_fc.comm.launch import spawn
from partial_fc.findings import counted
from partial_fc.flags import LaunchFlags, flag, is_given

_BLOCKED = (signal.SIGINT,)  # in the ranks, until they call `start`, or earlier interrupts.listen


def start(launch: LaunchFlags, first: Callable[[LaunchFlags], int | None] | None = None) -> int | None:
    """Starts the processes of this host if the flags ask for them, each with this command line, and waits for their
    end. first: another way to start them, which returns a status if it did.

    Returns the exit status; None: this process is one of those that train. Raises ValueError if the flags contradict
    each other or the launcher, StartError if hosts do not find each other.
    """
    interrupts.listen()  # in programs that do not start as `partial-fc`, too
    status = first(launch) if first else None
    if status is not None:
        return status
    # The processes of --nodes and --gpus; with --restarts, also the one that another launcher has meant.
    if comm.started_here():
        spawn.stay_with_parent()
        return None
    by = comm.detect()
    if (notes := comm.unused(by, launch.nodes)) and by.rank == 0 and launch.nodes == launch.gpus == 1:
        print(*notes, sep="\n", file=sys.stderr, flush=True)
    if launch.restarts and (by.backend == "horovod" or by.launcher == "torchrun"):
        instead = "torchrun --max-restarts" if by.backend == "torch" else "bash run.sh --restarts"
        raise ValueError(
            f"--restarts {launch.restarts} under {by.launcher}, which starts processes itself: use `{instead} N`"
        )
    if by.launcher in spawn.LEAVES_BEHIND:
        spawn.stay_with_parent()
    given = [name for name in ("nodes", "gpus", "nr", "master_addr", "master_port") if is_given(launch, name)]
    flags = ", ".join(f"{flag(name)} {getattr(launch, name)}" for name in given)
    if given == ["gpus"] and by.is_host:
        return spawn_here(launch, by.size, by.rank, by.master_addr, by.master_port)
    if given and by.backend != "single":
        raise ValueError(
            f"{by.launcher} has started this process as rank {by.rank} of {by.size}, and says itself where the others "
            f"are: leave {flags} away, or start without {by.launcher}"
        )
    if launch.nodes == launch.gpus == 1:
        if given:
            print(f"note: {flags} without effect: one process, which needs no others", file=sys.stderr)
        return spawn.supervise(_this_command(), [by], launch.restarts, blocked=_BLOCKED) if launch.restarts else None
    port = launch.master_port or (8888 if launch.nodes > 1 else None)
    return spawn_here(launch, launch.nodes, launch.nr, launch.master_addr or "127.0.0.1", port)


def spawn_here(launch: LaunchFlags, nodes: int, nr: int, master_addr: str, master_port: int | None, **more: Any) -> int:
    """Starts the --gpus processes of host `nr` of `nodes`; returns their exit status. more: as spawn.run has it."""
    print(f"starting {counted(launch.gpus, 'process')}", file=sys.stderr, flush=True)
    return spawn.run(
        _this_command(),
        nodes=nodes,
        gpus=launch.gpus,
        nr=nr,
        master_addr=master_addr,
        master_port=master_port,
        blocked=_BLOCKED,
        restarts=launch.restarts,
        **more,
    )


def _this_command() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def join(launch: LaunchFlags, device_type: str) -> World:
    """Joins the other processes of this launch. device_type: "cpu" or "cuda"."""
    world = comm.init(
        device_type,
        comm_timeout_s=launch.comm_timeout,
        start_timeout_s=launch.start_timeout,
        network_interface=launch.network_interface,
    )
    interrupts.always_raise()  # there is something to close now
    if world.rank == 0:
        _print_notes(launch, world)
    return world


def _print_notes(launch: LaunchFlags, world: World) -> None:
    """Prints which of the given flags have no effect in this world."""
    import torch

    if world.backend == "torch" and world.size > 1 and not torch.cuda.is_available():
        print(f"no GPU here: {world.size} processes on the CPU, over gloo", flush=True)
    names = ("network_interface", "comm_timeout", "start_timeout")
    vain = {
        "single": dict.fromkeys(names, "one process"),
        "horovod": {"start_timeout": "Horovod's launcher has its own --start-timeout"},
        "torch": {},
    }
    for name, why in vain[world.backend].items():
        if why and is_given(launch, name):
            print(f"note: {flag(name)} without effect: {why}", file=sys.stderr, flush=True)
