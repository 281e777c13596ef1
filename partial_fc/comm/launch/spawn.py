"""Starts and supervises the processes of this host: `partial-fc train RECIPE --gpus 2`, without another launcher.

Each runs the same command again, with its rank in the variables that torchrun would set. This process then only passes
on what they print and sees to it that they end together.
"""

import ctypes
import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from partial_fc.comm.launch.detect import LISTENING_SOCKET, PARENT

_POLL_S = 0.1
_FAILURE_GRACE_S = 5.0  # from SIGTERM to SIGKILL when another rank has failed: there is nothing left to save
# When the user or a scheduler ends the run; a second signal ends it at once. After these two it writes a checkpoint.
_SIGNAL_GRACE_S = {signal.SIGTERM: 600.0, signal.SIGUSR1: math.inf}
_OTHER_SIGNAL_GRACE_S = 30.0
_LEAVING_GRACE_S = 30.0  # from the first rank that ends pre-empted to the last: they end together
PREEMPTED = os.EX_TEMPFAIL  # exit status of a rank that was asked to end, and has written a checkpoint
_PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass
class _Rank:
    """One process that was started here. Its lines are passed on whole, so that those of two ranks do not mix."""

    number: int
    process: subprocess.Popen[bytes]
    rest: dict[int, bytes] = field(default_factory=dict)  # of the last line, by descriptor of this process: 1 or 2


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

    Returns 0, or the status of the rank that failed first (128 + n for signal n, as a shell has it); the others are
    then ended. Signals are passed on; PREEMPTED where all ranks that did not end with 0 answer them so. When this
    process is killed, `stay_with_parent` ends the others.
    """
    if not master_port:
        listening = _listen(master_addr)
    port = master_port or listening.getsockname()[1]  # type: ignore[union-attr]
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    # What is ignored stays so: nohup ignores SIGHUP, a shell's background job SIGINT.
    before = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    ranks: list[_Rank] = []
    try:
        for local in range(gpus):
            variables = {
                "RANK": nr * gpus + local,
                "WORLD_SIZE": nodes * gpus,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": gpus,
                "MASTER_ADDR": master_addr,
                "MASTER_PORT": port,
                PARENT: os.getpid(),
                "PYTHONUNBUFFERED": 1,  # lines arrive when they are printed
            }
            ranks.append(_start(command, {**environ, **variables}, listening))
        if listening:
            listening.close()
        return _supervise(ranks, received)
    except BrokenPipeError:
        return 128 + signal.SIGPIPE  # `... | head`: nobody reads any more
    finally:
        _signal(ranks, signal.SIGKILL)
        for rank in ranks:
            rank.process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


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


def _start(command: Sequence[str], environ: Mapping[str, str | int], listening: socket.socket | None) -> _Rank:
    variables = dict(environ)
    kept_descriptors = [listening.fileno()] if listening and variables["RANK"] == 0 else []
    if kept_descriptors:
        variables[LISTENING_SOCKET] = kept_descriptors[0]
    process = subprocess.Popen(
        command,
        env={name: str(value) for name, value in variables.items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=kept_descriptors,
        process_group=0,  # Ctrl-C in a terminal then reaches only us, and they get it from us, once
    )
    return _Rank(int(variables["RANK"]), process)


def stay_with_parent() -> None:
    """Has this process, which `run` started, killed when the one that started it is gone, in whatever way."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):  # gone before we asked
        os._exit(1)


def _supervise(ranks: list[_Rank], received: list[int]) -> int:
    """Passes on lines and signals until all ranks have ended; returns the exit status of `run`."""
    status, requested = 0, 0
    expected = {0, PREEMPTED}  # ways to end that are no failure
    kill_at = math.inf
    running = list(ranks)
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            for descriptor, pipe in ((1, rank.process.stdout), (2, rank.process.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, (rank, descriptor))
        while running:
            _pass_on(selector, _POLL_S)
            ended = [rank for rank in running if rank.process.poll() is not None]
            running = [rank for rank in running if rank not in ended]
            failed = [rank for rank in ended if rank.process.returncode not in expected]
            if any(rank.process.returncode == PREEMPTED for rank in ended):
                kill_at = min(kill_at, time.monotonic() + _LEAVING_GRACE_S)
            if failed and not status:
                _pass_on_all(selector)  # what they printed comes first
                _print_failures(failed, running)
                status = _shell_status(failed[0].process.returncode)
                kill_at = time.monotonic() + _FAILURE_GRACE_S
                _signal(running, signal.SIGTERM)
            for number in received:
                grace_s = _SIGNAL_GRACE_S.get(signal.Signals(number), _OTHER_SIGNAL_GRACE_S)
                # A second one: whoever sends it does not want to wait.
                kill_at = time.monotonic() + (0.0 if requested else grace_s)
                requested = requested or 128 + number
                expected |= {-number, requested}
                # What a rank has started may be needed to write its checkpoint.
                _signal(running, number, with_children=number not in _SIGNAL_GRACE_S)
            received.clear()
            if time.monotonic() > kill_at:
                expected |= {-signal.SIGKILL}
                _signal(running, signal.SIGKILL)
        _pass_on_all(selector)
    for rank in ranks:
        for descriptor, rest in rank.rest.items():
            _write(descriptor, rest + b"\n" if rest else b"")
    statuses = {rank.process.returncode for rank in ranks} - {0}
    if not statuses and requested - 128 in _SIGNAL_GRACE_S:
        return 0  # asked when there was nothing left to stop
    return PREEMPTED if statuses == {PREEMPTED} else status or requested or max(map(_shell_status, statuses), default=0)


def _pass_on_all(selector: selectors.BaseSelector) -> None:
    while _pass_on(selector, 0):
        pass


def _pass_on(selector: selectors.BaseSelector, timeout_s: float) -> bool:
    """Prints the whole lines that have arrived. Returns whether anything had."""
    arrived = False
    for key, _ in selector.select(timeout_s):
        pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
        rank, descriptor = key.data
        data = os.read(pipe.fileno(), 1 << 16)
        arrived = True
        if not data:
            selector.unregister(pipe)
            pipe.close()
            continue
        text = rank.rest.get(descriptor, b"") + data
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1  # a progress bar has no line ends
        rank.rest[descriptor] = text[end:]
        _write(descriptor, text[:end])
    return arrived


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _print_failures(failed: list[_Rank], running: list[_Rank]) -> None:
    for rank in failed:
        code = rank.process.returncode
        how = f"exit status {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
        if code == -signal.SIGKILL:
            how += " (for lack of memory? `dmesg` tells)"
        more = f"; ending {', '.join(f'rank {other.number}' for other in running)}" if running else ""
        _write(2, f"rank {rank.number} on {socket.gethostname()} ended with {how}{more}\n".encode())


def _shell_status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _signal(ranks: Sequence[_Rank], number: int, with_children: bool = True) -> None:
    """Sends a signal to the ranks, and to whatever they have started themselves."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            if with_children:
                os.killpg(rank.process.pid, number)
            else:
                rank.process.send_signal(number)
