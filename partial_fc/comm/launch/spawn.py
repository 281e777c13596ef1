"""Starts the processes of this host: `partial-fc train RECIPE --gpus 2`, without another launcher.

Each runs the same command again, with its rank in the variables that torchrun would set. supervisor.py then only passes
on what they print and sees to it that they end together.
"""

import ctypes
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from partial_fc import supervisor, terminal
from partial_fc.comm.auth.handshake import SECRET
from partial_fc.comm.launch.detect import LISTENING_SOCKET, PARENT
from partial_fc.supervisor import Command

_FAILURE_GRACE_S = supervisor.FAILURE_GRACE_S
_PR_SET_PDEATHSIG = 1  # prctl(2)
_PARENT_POLL_S = 1.0
_ORPHAN_GRACE_S = 600.0  # for the last checkpoint of a process whose launcher was killed
# Launchers whose processes would train on where they, or the process that they have for each, are killed.
LEAVES_BEHIND = ("torchrun", "horovodrun")


def run(
    command: Sequence[str],
    *,
    nodes: int,
    gpus: int,
    nr: int,
    master_addr: str,
    master_port: int | None,
    listening: socket.socket | None = None,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Runs `command` as the ranks nr * gpus to nr * gpus + gpus - 1 of nodes * gpus, and waits for them.

    master_port: None takes a free one of this host, which is then the only node; raises ValueError where master_addr is
    no IPv4 address of it. listening: a socket of node 0 that listens at the port already; it is closed. environ: what
    they get besides what says who they are.

    Returns the exit status as supervisor.run. When this process is killed, `stay_with_parent` ends the others.
    """
    if not master_port:
        listening = _listen(master_addr)
    port = master_port or listening.getsockname()[1]  # type: ignore[union-attr]
    if nodes == 1:
        environ = {**environ, SECRET: secrets.token_hex(32)}
    commands = []
    for local in range(gpus):
        rank = nr * gpus + local
        variables = {
            "RANK": rank,
            "WORLD_SIZE": nodes * gpus,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": gpus,
            "MASTER_ADDR": master_addr,
            "MASTER_PORT": port,
            PARENT: os.getpid(),
            "PYTHONUNBUFFERED": 1,  # lines arrive when they are printed
            **terminal.told(),
        }
        kept_descriptors = [listening.fileno()] if listening and rank == 0 else []
        if kept_descriptors:
            variables[LISTENING_SOCKET] = kept_descriptors[0]
        given = {**environ, **variables}
        commands.append(Command(name=f"rank {rank}", words=command, environ=given, pass_fds=kept_descriptors))
    return supervisor.run(commands, _FAILURE_GRACE_S, started=listening.close if listening else lambda: None)


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


def stay_with_parent(parent: int = 0) -> None:
    """Has this process end when the one that started it, and would end it, is gone, in whatever way: as if it had got
    SIGTERM, with a checkpoint where it trains, and without where that takes too long.

    parent: its number, 0: what the environment says. What another launcher than `run` has started is treated alike;
    whether that was gone before is not known then.
    """
    parent = parent or int(os.environ.get(PARENT) or os.getppid())
    end_with(parent)
    threading.Thread(target=_outlive, args=(parent,), name="parent", daemon=True).start()


def end_with(parent: int) -> None:
    """This process gets SIGTERM when its parent, which has this number, is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # gone before we asked
        os._exit(1)


def _outlive(parent: int) -> None:
    """Waits for the end of the parent, then some more, and ends the process: what hangs does not hear SIGTERM."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(1)
