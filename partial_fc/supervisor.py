"""The supervisor of processes: starts them, passes on their output and signals, and ends them together.

Used by `--gpus` (comm/launch/spawn.py), for this host's processes, and `partial-fc launch` (launcher/), for processes
possibly behind ssh or mpirun. Does not import torch.
"""

import math
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from partial_fc import output

_POLL_S = 0.1
_PAUSE_S = 0.01  # for a slow reader
_LONGEST_LINE = 1 << 16  # bytes; longer ones are passed on in pieces
FAILURE_GRACE_S = 5.0  # from SIGTERM to SIGKILL when another process has failed: nothing is left to save
# For a scheduler's SIGTERM: the run writes a checkpoint first; a second signal ends it at once.
_SIGNAL_GRACE_S = {signal.SIGTERM: 600.0, signal.SIGUSR1: math.inf}
INTERRUPT_GRACE_S = 600.0  # for Ctrl-C, and a closed terminal; our jobs write a checkpoint, too
_LEAVING_GRACE_S = 30.0  # from the first rank that ends pre-empted to the last
_HELPER_GRACE_S = 10.0  # from the end of all workers to that of their helpers
_BEAT_S = 5.0
# Further signals within so many seconds belong to the first: timeout(1) and schedulers send theirs to the command and
# to its process group, so that it arrives twice.
_TOGETHER_S = 1.0
_LOST_S = 5.0  # from SIGKILL, sent through the lifeline, to the end of the local process
PREEMPTED = os.EX_TEMPFAIL  # exit status of a rank that was asked to end, and has written a checkpoint


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process to start. `environ` is its environment; its standard input is empty, or the lifeline."""

    name: str
    """Name in messages: "rank 1"."""
    words: Sequence[str]
    environ: Mapping[str, str | int] = field(default_factory=lambda: os.environ)
    host: str = field(default_factory=socket.gethostname)
    """Its host, for messages."""
    pass_fds: Sequence[int] = ()
    blocked: Collection[signal.Signals] = ()
    """Signals that wait until it unblocks them, besides those that are blocked here."""
    prefix: str = ""
    """Before each of its lines."""
    helper: bool = False
    """Serves the others, and is ended after them."""
    lifeline: str | None = None
    """The first line of standard input of a shell, perhaps on another host (launcher/shell.py), that the command line
    leads to. Signals follow, a line each; at the end of input the shell ends what it has started."""
    beats: bool = False
    """Whether to write to the lifeline every few seconds, so that the far end detects a broken connection."""
    pause_s: float = 0.0
    """The pause before its start: sshd refuses many connections at once."""


@dataclass
class _Process:
    """A started process. Its lines are passed on whole, so that those of two processes do not mix."""

    command: Command
    popen: subprocess.Popen[bytes]
    rest: dict[int, bytes] = field(default_factory=dict)  # of the last line, by descriptor of this process: 1 or 2
    killed_at: float = math.inf

    def send(self, number: int, with_children: bool = True) -> None:
        """Sends a signal to the process, or also to the processes that it has started."""
        if self.popen.stdin is not None:
            self.write(f"{signal.Signals(number).name.removeprefix('SIG')}{' -' if with_children else ''}\n")
            if number == signal.SIGKILL:
                self._cut_off()
            return
        with suppress(ProcessLookupError):
            if with_children:
                os.killpg(self.popen.pid, number)
            else:
                self.popen.send_signal(number)

    def write(self, text: str) -> None:
        """Writes to the lifeline, if it is open."""
        assert self.popen.stdin is not None
        with suppress(OSError, ValueError):
            os.write(self.popen.stdin.fileno(), text.encode())

    def close_lifeline(self) -> None:
        """Closes the lifeline of a process that has ended, which ends what is left at the other end."""
        if self.popen.stdin is not None and not self.popen.stdin.closed:
            self.popen.stdin.close()

    def _cut_off(self) -> None:
        self.close_lifeline()
        self.killed_at = min(self.killed_at, time.monotonic())
        if time.monotonic() > self.killed_at + _LOST_S:  # ssh after a broken connection
            with suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)


def run(
    commands: Sequence[Command],
    failure_grace_s: float = FAILURE_GRACE_S,
    interrupt_grace_s: float = INTERRUPT_GRACE_S,
    started: Callable[[], None] = lambda: None,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    again: Callable[[int, Collection[int]], Sequence[Command]] = lambda status, signals: (),
) -> int:
    """Starts all commands within a context, calls `started`, and waits for their end. After a failure, and no signal,
    starts the commands that `again` returns, given the status and the list of signals that arrive meanwhile.

    Returns 0, or the status of the one that failed first (128 + n for signal n, as a shell has it); the others are then
    ended. Signals are passed on to all but helpers; returns PREEMPTED if all that did not end with 0 end so. Helpers
    are ended some seconds after the others. No process is left, whatever happens here, and no signal ends the context.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # unprintable output ends no process: output.py
    with _signals() as received, within():
        while True:
            processes: list[_Process] = []
            try:
                for command in commands:
                    time.sleep(command.pause_s)
                    processes.append(_start(command))
                started()
                supervision = _Supervision(processes, received, failure_grace_s, interrupt_grace_s)
                status = supervision.run()
            finally:
                _end(processes)
                output.drain()
            failed = supervision.status and not supervision.requested
            commands = again(status, received) if failed else ()
            if not commands:
                return status


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Yields the list of signals that arrive within the block."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    # Ignored signals stay ignored: nohup ignores SIGHUP, a shell's background job SIGINT.
    before = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(command: Command) -> _Process:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, command.blocked)
    try:
        popen = subprocess.Popen(
            command.words,
            env={name: str(value) for name, value in command.environ.items()},
            stdin=subprocess.DEVNULL if command.lifeline is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=command.pass_fds,
            process_group=0,  # Ctrl-C in a terminal then reaches only us, and we pass it on once
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process = _Process(command, popen)
    if command.lifeline is not None:
        process.write(command.lifeline + "\n")
        assert popen.stdin is not None
        os.set_blocking(popen.stdin.fileno(), False)
    return process


def _end(processes: Sequence[_Process]) -> None:
    """Kills all that still run."""
    for process in processes:
        process.send(signal.SIGKILL)
    for process in processes:
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(_POLL_S)
                break
            process.send(signal.SIGKILL)


@dataclass
class _Supervision:
    """The state of processes that run together, until all have ended."""

    processes: list[_Process]
    received: list[int]
    failure_grace_s: float
    interrupt_grace_s: float
    status: int = 0  # of the process that failed first
    requested: int = 0  # 128 + the first signal that arrived
    requested_until: float = 0.0  # further signals until then belong to the first
    expected: set[int] = field(default_factory=lambda: {0, PREEMPTED})  # ways to end that are no failure
    kill_at: float = math.inf
    end_helpers_at: float = math.inf
    helpers_asked: bool = False
    beat_at: float = 0.0
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def run(self) -> int:
        """Passes on lines and signals until all have ended; returns the exit status of `run`."""
        self.running = list(self.processes)
        with self.selector:
            for process in self.processes:
                for descriptor, pipe in ((1, process.popen.stdout), (2, process.popen.stderr)):
                    assert pipe is not None
                    os.set_blocking(pipe.fileno(), False)
                    self.selector.register(pipe, selectors.EVENT_READ, (process, descriptor))
            while self.running:
                self._pass_on(_POLL_S)
                self._beat()
                self._look()
                self._pass_signals_on()
                self._end_helpers()
                if time.monotonic() > self.kill_at:
                    self.expected |= {-signal.SIGKILL, 128 + signal.SIGKILL}
                    self._send(self.running, signal.SIGKILL)
            self._pass_on_all()
        for process in self.processes:
            for descriptor, rest in process.rest.items():
                output.write(descriptor, _with_prefix(process, rest + b"\n") if rest else b"")
        return self._result()

    def _result(self) -> int:
        statuses = {process.popen.returncode for process in self._workers(self.processes)} - {0}
        if not statuses and not self.status and self.requested - 128 in _SIGNAL_GRACE_S:
            return 0  # signalled when nothing was left to stop
        if statuses == {PREEMPTED} and not self.status:
            return PREEMPTED
        return self.status or self.requested or max(map(_shell_status, statuses), default=0)

    def _look(self) -> None:
        """Checks which processes have ended; the first failure ends the others."""
        ended = [process for process in self.running if process.popen.poll() is not None]
        self.running = [process for process in self.running if process not in ended]
        for process in ended:
            process.close_lifeline()
        asked = [process for process in ended if process.command.helper] if self.helpers_asked else []
        failed = [p for p in ended if p.popen.returncode not in self.expected and p not in asked]
        if any(process.popen.returncode == PREEMPTED for process in ended):
            self.kill_at = min(self.kill_at, time.monotonic() + _LEAVING_GRACE_S)
        if failed and not self.status:
            self._pass_on_all()  # their output comes first
            _print_failures(failed, self.running)
            self.status = _shell_status(failed[0].popen.returncode)
            self.kill_at = time.monotonic() + self.failure_grace_s
            self._send(self.running, signal.SIGTERM)

    def _pass_signals_on(self) -> None:
        for number in self.received:
            now = time.monotonic()
            if now < self.requested_until:
                continue
            grace_s = _SIGNAL_GRACE_S.get(signal.Signals(number), self.interrupt_grace_s)
            # A second signal: its sender does not want to wait.
            self.kill_at = now + (0.0 if self.requested else grace_s)
            self.requested_until = self.requested_until or now + _TOGETHER_S
            self.requested = self.requested or 128 + number
            self.expected |= {-number, 128 + number, self.requested}
            # The processes that a rank has started may be needed for its checkpoint.
            self._send(self._workers(self.running), number, with_children=number not in _SIGNAL_GRACE_S)
        self.received.clear()

    def _end_helpers(self) -> None:
        """Ends the helpers, at once if the others were signalled: helpers get no signals."""
        if not self.running or self._workers(self.running) or self.helpers_asked:
            return
        now = time.monotonic()
        stopped = any(process.popen.returncode for process in self._workers(self.processes))
        self.end_helpers_at = min(self.end_helpers_at, now + (0.0 if stopped else _HELPER_GRACE_S))
        if now >= self.end_helpers_at:
            self.helpers_asked = True
            self.kill_at = min(self.kill_at, now + self.failure_grace_s)
            self._send(self.running, signal.SIGTERM)

    def _beat(self) -> None:
        if time.monotonic() > self.beat_at:
            self.beat_at = time.monotonic() + _BEAT_S
            for process in self.running:
                if process.command.beats:
                    process.write("beat\n")

    @staticmethod
    def _workers(processes: Sequence[_Process]) -> list[_Process]:
        return [process for process in processes if not process.command.helper]

    @staticmethod
    def _send(processes: Sequence[_Process], number: int, with_children: bool = True) -> None:
        for process in processes:
            process.send(number, with_children)

    def _pass_on_all(self) -> None:
        while self._pass_on(0):
            pass

    def _pass_on(self, timeout_s: float) -> bool:
        """Prints the whole lines that have arrived. Returns whether any did, or are left for a slow reader."""
        if output.busy():
            time.sleep(_PAUSE_S)
            return True
        arrived = False
        for key, _ in self.selector.select(timeout_s):
            pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
            process, descriptor = key.data
            data = os.read(pipe.fileno(), 1 << 16)
            arrived = True
            if not data:
                self.selector.unregister(pipe)
                pipe.close()
                continue
            text = process.rest.get(descriptor, b"") + data
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1  # a progress bar has no line ends
            if len(text) - end > _LONGEST_LINE:
                end = len(text)
            process.rest[descriptor] = text[end:]
            output.write(descriptor, _with_prefix(process, text[:end]))
        return arrived


def _with_prefix(process: _Process, lines: bytes) -> bytes:
    prefix = process.command.prefix.encode()
    return b"".join(prefix + line for line in lines.splitlines(keepends=True)) if prefix else lines


def _print_failures(failed: list[_Process], running: list[_Process]) -> None:
    for process in failed:
        code = process.popen.returncode
        number = -code if code < 0 else code - 128
        known = number in {*signal.Signals}
        name = f"signal {number} ({signal.strsignal(number)})" if known else ""
        how = name if code < 0 else f"exit status {code}" + (f", {name}" if name else "")
        if number == signal.SIGKILL:
            how += " (for lack of memory? `dmesg` tells)"
        more = f"; ending {', '.join(other.command.name for other in running)}" if running else ""
        output.write(2, f"{process.command.name} on {process.command.host} ended with {how}{more}\n".encode())


def _shell_status(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
