"""The start of this host's processes: `partial-fc train RECIPE --gpus 2`, without another launcher.

Each runs the same command, with its rank in torchrun's variables. supervisor.py prints their output and ends them.
"""

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from partial_fc import supervisor, terminal
from partial_fc.comm.launch import Launch
from partial_fc.comm.launch.detect import LISTENING_SOCKET, PARENT
from partial_fc.comm.launch.restarts import FURTHEST_STEP, Restarts
from partial_fc.supervisor import Command

_FAILURE_GRACE_S = supervisor.FAILURE_GRACE_S
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PARENT_POLL_S = 1.0
_ORPHAN_GRACE_S = 600.0  # for the last checkpoint, if the launcher was killed
# Launchers whose processes would continue after they, or their local daemons, are killed.
LEAVES_BEHIND = ("torchrun", "horovodrun")


def run(
    command: Sequence[str],
    *,
    gpus: int,
    nodes: int = 1,
    nr: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    listening: socket.socket | None = None,
    environ: Mapping[str, str] = os.environ,
    blocked: Collection[signal.Signals] = (),
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    restarts: int = 0,
) -> int:
    """Runs `command` as the ranks nr * gpus to nr * gpus + gpus - 1 of nodes * gpus, and waits for them.

    master_port: None takes a free one of this host, which is then the only node; raises ValueError if master_addr is
        not an IPv4 address of it
    listening: node 0's socket that listens at the port already; it is closed
    environ: the processes' variables besides those of the rank
    blocked, within: see supervisor
    restarts: at most so many, after failures

    Returns the exit status of supervisor.run. If this process is killed, `stay_with_parent` ends the others.
    """
    if not master_port:
        listening = _listen(master_addr)
    port = master_port or listening.getsockname()[1]  # type: ignore[union-attr]
    ranks = [Launch("torch", nr * gpus + i, nodes * gpus, i, gpus, "", master_addr, port) for i in range(gpus)]
    return supervise(command, ranks, restarts, listening, environ, blocked, within)


def supervise(
    command: Sequence[str],
    ranks: Sequence[Launch],
    num_restarts: int,
    listening: socket.socket | None = None,
    environ: Mapping[str, str] = os.environ,
    blocked: Collection[signal.Signals] = (),
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> int:
    """Runs `command` as these ranks, of which another launcher may have started one: this process."""
    restarts = Restarts(num_restarts) if num_restarts else None

    def commands(listening: socket.socket | None = None) -> list[Command]:
        return [_command(command, rank, environ, blocked, restarts, None if rank.rank else listening) for rank in ranks]

    def started() -> None:
        if listening:
            listening.close()

    def after(status: int, signals: Collection[int]) -> list[Command]:
        return commands() if restarts and restarts.allows(status, signals) else []

    return supervisor.run(commands(listening), _FAILURE_GRACE_S, started=started, within=within, again=after)


def _command(
    words: Sequence[str],
    rank: Launch,
    environ: Mapping[str, str],
    blocked: Collection[signal.Signals],
    restarts: Restarts | None,
    listening: socket.socket | None,
) -> Command:
    """Returns the command of one rank. listening: rank 0's socket, at its first start."""
    variables: dict[str, str | int] = {PARENT: os.getpid(), "PYTHONUNBUFFERED": 1, **terminal.told()}  # lines at once
    if rank.backend == "torch":
        variables |= {
            "RANK": rank.rank,
            "WORLD_SIZE": rank.size,
            "LOCAL_RANK": rank.local_rank,
            "LOCAL_WORLD_SIZE": rank.local_size,
            "MASTER_ADDR": rank.master_addr,
            "MASTER_PORT": rank.master_port,
        }
    shared = {FURTHEST_STEP: restarts.file} if restarts else {}
    if listening:
        shared[LISTENING_SOCKET] = listening.fileno()
    return Command(
        name=f"rank {rank.rank}",
        words=words,
        environ={**environ, **variables, **shared},
        pass_fds=list(shared.values()),
        blocked=blocked,
    )


def _listen(address: str) -> socket.socket:
    """Opens a socket that listens at a free port."""
    try:
        return socket.create_server((address, 0))
    except OSError as error:  # of the name, too
        reason = (error.strerror or str(error)).partition(" (")[0]
        raise ValueError(
            f"--master-addr {address}: {socket.gethostname()}, the only host of this run, cannot listen there "
            f"({reason}). With --nodes 1 leave it away, or give an IPv4 address of this host (see `ip addr`)"
        ) from None


def stay_with_parent() -> None:
    """Ends this process when its parent is gone, as SIGTERM does: with a checkpoint if it trains, without one if that
    takes too long.

    Processes of other launchers are treated alike, except that a parent that ended before this call is not noticed.
    """
    parent = int(os.environ.get(PARENT) or os.getppid())
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # gone before prctl
        os._exit(1)
    threading.Thread(target=_outlive, args=(parent,), name="parent", daemon=True).start()


def _outlive(parent: int) -> None:
    """Waits for the end of the parent, then ends the process: a hanging one does not react to SIGTERM."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(1)
