"""The start and join of a run's processes, by its flags: all that LaunchFlags and RendezvousFlags cause.

    status = start(config.launch, config.rendezvous)    # here without another launcher: the processes of this host
    world = join(config.launch, "cpu")                  # in a process that trains

A process that gets a status exits with it; None: it continues.
"""

import os
import signal
import socket
import sys
from functools import partial
from typing import Any

from partial_fc import comm, interrupts
from partial_fc.comm import World
from partial_fc.comm.launch import addresses, meet_nodes, spawn, stores
from partial_fc.findings import counted
from partial_fc.flags import LaunchFlags, RendezvousFlags, flag, is_given

_BLOCKED = (signal.SIGINT,)  # in the ranks, until they call `start`, or earlier interrupts.listen


def start(launch: LaunchFlags, rendezvous: RendezvousFlags | None = None) -> int | None:
    """Starts the processes of this host if the flags ask for them, each with this command line, and waits for their
    end; with --num-shards after the rendezvous of hosts.

    Returns the exit status; None: this process is one of those that train. Raises ValueError if the flags contradict
    each other or the launcher, StartError if hosts do not find each other.
    """
    interrupts.listen()  # in programs that do not start as `partial-fc`, too
    status = _start_shard(rendezvous, launch) if rendezvous else None
    return _start_node(launch) if status is None else status


def _start_node(launch: LaunchFlags) -> int | None:
    """Starts the processes of --nodes and --gpus; with --restarts, also the one that another launcher has meant."""
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
        return _spawn(launch, by.size, by.rank, by.master_addr, by.master_port)
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
    return _spawn(launch, launch.nodes, launch.nr, launch.master_addr or "127.0.0.1", port)


def _spawn(launch: LaunchFlags, nodes: int, nr: int, master_addr: str, master_port: int | None, **shards: Any) -> int:
    """shards: as spawn.run has it, of --num-shards."""
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
        **shards,
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


# ---- hosts without a launcher: --num-shards


def _start_shard(rendezvous: RendezvousFlags, launch: LaunchFlags) -> int | None:
    """Starts this host's processes of several, once shard 0 is found. One shard, or a launcher, needs no rendezvous."""
    if comm.started_here():
        return None
    by = comm.detect()
    if by.backend != "single":
        _compare(rendezvous, by)
    if rendezvous.num_shards == 1 or by.backend != "single":
        # The folder may also hold a run's checkpoints, and a run id is only a name.
        given = [name for name in ("redis_host", "redis_password_file") if is_given(rendezvous, name)]
        if given:
            why = f"{by.launcher} says where the others are" if by.launcher else "one shard meets no others"
            print(f"note: {', '.join(map(flag, given))} without effect: {why}", file=sys.stderr, flush=True)
        return None
    if rendezvous.run_id is None:
        raise ValueError(
            f"--num-shards {rendezvous.num_shards} needs --run-id: a name for this run, the same on all hosts, for "
            "example --run-id resnet-1"
        )
    for name in ("nodes", "nr", "master_addr"):
        if is_given(launch, name):
            raise ValueError(f"{flag(name)} and --num-shards are two ways to start a run: give one of them")
    return _run_shard(rendezvous, launch, rendezvous.run_id)


def _run_shard(rendezvous: RendezvousFlags, launch: LaunchFlags, run_id: str) -> int:
    num, number = rendezvous.num_shards, rendezvous.shard_id
    store = _open_store(rendezvous, run_id, launch.start_timeout)
    if number:
        address, port = meet_nodes.find(store, number, launch.start_timeout)
        environ = dict(os.environ)
        # Gloo listens at the address over which this host reaches shard 0 (and there, see meet_ranks.py): its default
        # is that of the host's name, on Debian 127.0.1.1.
        if launch.network_interface is None and (way := addresses.interface_of(addresses.towards(address))):
            environ.setdefault("GLOO_SOCKET_IFNAME", way)
        return _spawn(launch, num, number, address, port, environ=environ)
    reachable = addresses.reachable(launch.network_interface)
    with _listen(reachable[0] if launch.network_interface else "", launch.master_port) as listening:
        port = listening.getsockname()[1]
        within = partial(meet_nodes.announced, store, meet_nodes.Shard0.here(reachable, port))
        own = reachable[0] if len(reachable) == 1 else addresses.ANY  # of several the others choose
        return _spawn(launch, num, 0, own, port, listening=listening, within=within)


def _compare(rendezvous: RendezvousFlags, by: comm.Launch) -> None:
    """Raises ValueError if the flags contradict the launcher."""
    hosts = {"num_shards": by.size // by.local_size, "shard_id": by.rank // by.local_size}
    for name, value in hosts.items():
        if is_given(rendezvous, name) and getattr(rendezvous, name) != value:
            raise ValueError(
                f"{flag(name)} {getattr(rendezvous, name)}, but {by.launcher} has started this process as rank "
                f"{by.rank} of {by.size}, {by.local_size} on each host, which makes it {value}: leave --num-shards "
                f"and --shard-id away, or start without {by.launcher}"
            )


def _open_store(flags: RendezvousFlags, run_id: str, timeout_s: float) -> stores.Store:
    if flags.redis_host is None:
        return stores.FileStore(flags.file_store_path, run_id)
    try:
        import redis  # noqa: F401
    except ImportError:
        raise ValueError(
            "--redis-host needs the package redis: `pip install redis` on each host, or let them meet in a folder "
            "(--file-store-path)"
        ) from None
    password = os.environ.get("REDIS_PASSWORD")
    if flags.redis_password_file is not None:
        password = flags.redis_password_file.read_text(encoding="utf-8").strip("\r\n")
    return stores.open_redis(
        flags.redis_host,
        flags.redis_port,
        run_id,
        timeout_s,
        username=os.environ.get("REDIS_USERNAME"),
        password=password,
    )


def _listen(address: str, port: int | None) -> socket.socket:
    """Returns rank 0's socket, opened now so that the port cannot be taken meanwhile."""
    try:
        return socket.create_server((address, port or 0), backlog=128)
    except OSError as error:
        raise ValueError(f"--master-port {port}: cannot listen there on {socket.gethostname()}: {error}") from None
