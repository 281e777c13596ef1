"""The rendezvous of ranks over torch.distributed, in a key-value store that rank 0 serves at the launch's master
address, or torchrun's agent does.

1. rank 0 writes the name of its attempt into the store; all other keys are that attempt's. The others wait for one that
   has no outcome yet: after a failure rank 0 may be started again later than they are, elsewhere, or with fewer ranks,
   and what the earlier processes wrote, or the store that they left, is still there
2. every rank writes the size of its launch, its kind of device, and claims its number: two jobs that meet
   by mistake differ in the former or claim the same number
3. rank 0 sees all ranks there, with one kind of device: the outcome is "all here"
"""

import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from partial_fc import printable
from partial_fc.comm.launch import Launch, addresses, tcp_store
from partial_fc.comm.launch.detect import LISTENING_SOCKET, StartError, devices_differ, expect, has_agent, left_over
from partial_fc.comm.launch.tcp_store import NotAStore, dial, has_ended, read

_RETRY_S = 0.025  # to the second try to reach rank 0; then longer each time
_LINGER_S = 1.0  # rank 0 stays after a failure, so that the others can read the outcome in its store
_LATER_S = 10.0  # the others wait longer, as rank 0 knows which ranks are missing
_POLL_S = 0.05
_CHECKS_A_SECOND = 5000  # of all ranks together, as one of them hosts the store
_NOTICE_S = 10.0  # after which the missing ones are printed
_SOON_S = 2.0  # the same in a step of `srun --pty`
ALL_HERE = "all here"
ATTEMPT = "attempt"
"""Key of the newest attempt's name."""
_OUTCOME, _ADDRESS = "outcome", "address of rank 0"

_stores: dict[tuple[str, int], dist.TCPStore] = {}


@dataclass(frozen=True)
class Meeting:
    """Ranks that have met. server: a connection to the store; keys: those of this attempt in it; attempt: its name."""

    server: dist.TCPStore
    keys: dist.Store
    attempt: str


def meet(launch: Launch, timeout_s: float, device: str = "cpu") -> Meeting:
    """Returns the store of this launch, once all its ranks have joined. device: "cpu" or "cuda", equal on all of them.

    Raises StartError after timeout_s seconds at the latest (ranks other than 0: up to 10 more, so that rank 0 can name
    the missing ones); at once if ranks contradict each other.
    """
    deadline, at, outcome = time.monotonic() + timeout_s, (launch.master_addr, launch.master_port), ""
    while not outcome:
        attempt = _begin(launch, timeout_s) if launch.rank == 0 else _newest(launch, timeout_s, deadline)
        try:
            rank = _Rank(_stores[at], attempt, launch, device, timeout_s)
            outcome = rank.outcome_of_all(max(1.0, deadline - time.monotonic()))
        except dist.DistError as error:
            del _stores[at]
            raise _gone(launch, error) from None
    if outcome != ALL_HERE:
        if launch.rank == 0:
            time.sleep(_LINGER_S)
        raise StartError(f"{launch}: {printable.name(outcome[:4000])}")
    if launch.master_addr == addresses.ANY and (interface := addresses.interface_of(read(rank.keys, _ADDRESS))):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # the way between the hosts; see start.py
    return Meeting(_stores[at], rank.keys, attempt)


def _begin(launch: Launch, timeout_s: float) -> str:
    """Returns the name of rank 0's new attempt."""
    at, attempt = (launch.master_addr, launch.master_port), secrets.token_hex(8)
    if at not in _stores:
        _stores[at] = _connect(launch, timeout_s, timeout_s) if has_agent() else _host(launch, timeout_s)
    _stores[at].set(attempt, "")
    _stores[at].set(ATTEMPT, attempt)
    return attempt


def _newest(launch: Launch, timeout_s: float, deadline: float) -> str:
    """Returns the name of rank 0's attempt that has no outcome yet. Raises StartError at the deadline."""
    at, attempt, outcome = (launch.master_addr, launch.master_port), "", ""
    while True:
        try:
            if at not in _stores:
                _stores[at] = _connect(launch, timeout_s, deadline - time.monotonic())
            attempt = read(_stores[at], ATTEMPT)
            outcome = read(dist.PrefixStore(attempt, _stores[at]), _OUTCOME)
            if attempt and not outcome:
                return attempt
        except dist.DistError as error:
            _stores.pop(at, None)
            if has_agent():
                raise _gone(launch, error) from None
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    if outcome != ALL_HERE:
        why = printable.name(outcome[:4000]) or f"rank 0 did not join {_where(launch)} within {timeout_s:g} s"
        raise StartError(f"{launch}: {why}.{left_over(launch)}")
    holder = printable.name(read(dist.PrefixStore(attempt, _stores[at]), f"rank {launch.rank}")[:200])
    raise StartError(
        f"{launch}: the ranks at {_where(launch)} have met without this one; rank {launch.rank} there is "
        f"{holder or 'none'}. {_TWICE}"
    )


_TWICE = (
    "Two nodes with the same --nr or --shard-id? Or two jobs with the same master address and port? Give each job a "
    "port of its own"
)


class _Rank:
    """One rank at the rendezvous. timeout_s: the time for all to join."""

    def __init__(self, server: dist.TCPStore, attempt: str, launch: Launch, device: str, timeout_s: float):
        self.keys = dist.PrefixStore(attempt, server)
        self._server, self._attempt = server, attempt
        self._launch, self._device, self._timeout_s = launch, device, timeout_s
        self._names = [f"rank {rank}" for rank in range(launch.size)]
        self._name = self._names[launch.rank]

    def outcome_of_all(self, left_s: float) -> str:
        """Returns the outcome, after left_s seconds (rank 0), or some more, at most; "": rank 0 has begun again."""
        if problem := self._claim():
            return self._decide(problem)
        leads, started = self._launch.rank == 0, time.monotonic()
        patience_s, is_noted = left_s if leads else left_s + _LATER_S, not leads
        poll_s = max(_POLL_S, len(self._names) / _CHECKS_A_SECOND)
        while not (outcome := read(self.keys, _OUTCOME)):
            waited_s = time.monotonic() - started
            if text := self._all_here() or (self._missing() if waited_s > patience_s else ""):
                return self._decide(text)
            if not leads and read(self._server, ATTEMPT) != self._attempt:
                return ""
            if not is_noted and waited_s > (_SOON_S if self._in_pty() else _NOTICE_S):
                is_noted = True
                where, absent = _where(self._launch), ", ".join(self._absent())
                why = f". {self._remedy()}" if self._launch.launcher == "srun" else ""
                print(f"{self._launch} waits at {where} for {absent}{why}", file=sys.stderr, flush=True)
            time.sleep(poll_s)
        return outcome

    def _claim(self) -> str:
        """Writes this rank's number, size and device; returns the error, or ""."""
        launch, host = self._launch, socket.gethostname()
        process = f"{host} (process {os.getpid()})"
        local_size = f"{launch.size} processes, says {self._name} on {host}"
        first_size = self.keys.compare_set("size", "", local_size).decode(errors="replace")
        if first_size.partition(" ")[0] != str(launch.size):
            return (
                f"the ranks disagree on how many there are: {first_size}; {local_size}. Give every node the same "
                "--nodes (--num-shards) and --gpus, and every job a port of its own"
            )
        self.keys.set(f"device of {self._name}", self._device)
        if launch.master_addr != addresses.ANY:
            self.keys.set(_ADDRESS, launch.master_addr)
        holder = self.keys.compare_set(self._name, "", process).decode(errors="replace")
        number = holder.removeprefix(f"{host} (process ").removesuffix(")")
        if number.isdecimal() and has_ended(int(number)):  # it was killed, and this process is started in its place
            holder = self.keys.compare_set(self._name, holder, process).decode(errors="replace")
        return "" if holder == process else f"{self._name} is there twice: {holder} and {process}. {_TWICE}"

    def _decide(self, text: str) -> str:
        """Sets the outcome to `text`, unless there is one. Returns the one in effect."""
        return self.keys.compare_set(_OUTCOME, "", text).decode(errors="replace")

    def _all_here(self) -> str:
        """Returns the outcome on rank 0 if all ranks have joined; else ""."""
        if self._launch.rank != 0 or not self.keys.check(self._names):
            return ""
        devices = self.keys.multi_get([f"device of {rank}" for rank in self._names])
        return devices_differ([device.decode() for device in devices]) or ALL_HERE

    def _absent(self) -> list[str]:
        return [key for key in self._names if not self.keys.check([key])]

    def _missing(self) -> str:
        present = [f"{key}: {claim}" for key in self._names if (claim := read(self.keys, key))]
        return (
            f"{printable.some(self._absent(), 16)} did not join {_where(self._launch)} within {self._timeout_s:g} s. "
            f"There are: {printable.some(present, 16)}. {self._remedy()}"
        )

    def _in_pty(self) -> bool:
        return self._launch.launcher == "srun" and bool(os.environ.get("SLURM_PTY_PORT"))

    def _remedy(self) -> str:
        launch = self._launch
        if launch.launcher == "srun":
            shell, tasks = "Of a shell of `srun --pty` only task 0 is left.", "Their messages say why they ended."
            return f"{shell if self._in_pty() else tasks}{left_over(launch)}"
        text = (
            "Was the command started on every node, each with its own --nr (--shard-id), all with the same master "
            "address and port (--run-id), and do their messages say why they ended?"
        )
        if launch.rank == 0 and not addresses.is_local(launch.master_addr):
            text += f" {launch.master_addr} is no address of {socket.gethostname()}, where rank 0 runs."
        elif launch.master_addr in ("localhost", "127.0.0.1", "::1") and launch.size > launch.local_size:
            text += f" {launch.master_addr} means every host itself: other hosts need the address of this one."
        return text + left_over(launch)


# ---- the store


def _host(launch: Launch, timeout_s: float) -> dist.TCPStore:
    """Returns rank 0's store, at the master's port."""
    given = os.environ.pop(LISTENING_SOCKET, None)
    try:
        listening = socket.socket(fileno=int(given)) if given else _listen(launch)
    except OSError as error:
        raise StartError(
            f"{launch}: cannot listen at port {launch.master_port} ({_first_line(error)}). Does another job or "
            "program use it? Choose another one (--master-port or MASTER_PORT), the same on all nodes"
        ) from None
    return tcp_store.host(listening, launch.size, timeout_s)


def _listen(launch: Launch) -> socket.socket:
    """Listens at the master address; at all addresses if that is not this host's (behind address translation, or by
    mistake, which shows later), or if its name resolves to the loopback here, as Debian sets it up."""
    name, here = launch.master_addr, ""
    with suppress(OSError):
        resolved = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
        loops = any(address.startswith("127.") or address == "::1" for address in resolved)
        # Kubeflow's first operator gives "localhost" to the master.
        if not loops or (name in (*resolved, "localhost") and launch.local_size == launch.size):
            first = min(resolved, key=lambda address: ":" in address)  # IPv4, if it has both
            here = first if addresses.is_local(first) else ""
    if here in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("::", launch.master_port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True
        )
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    return socket.create_server((here, launch.master_port), family=family, backlog=128)


def _connect(launch: Launch, timeout_s: float, left_s: float) -> dist.TCPStore:
    """Returns a connection to the store at the master's address, once it answers there. Raises StartError."""
    if has_agent():
        expect(launch, "store of torchrun", launch.master_addr, launch.master_port)
    deadline, pause_s = time.monotonic() + left_s, _RETRY_S
    while True:
        left, is_silent = max(0.1, deadline - time.monotonic()), False
        try:
            store = dial(launch.master_addr, launch.master_port, left)
            store.set_timeout(timedelta(seconds=max(1.0, timeout_s)))
            return store
        except NotAStore as error:
            problem, is_silent = str(error), True
        except TimeoutError:
            problem = "no answer: is a firewall between the hosts, or the address wrong?"
        except socket.gaierror as error:
            problem = f"this host does not know the name ({error.strerror})"
        except OSError as error:
            problem = error.strerror or str(error)
        if time.monotonic() >= deadline:
            break
        # Rank 0 may come up soon: it may have been restarted at the same time.
        pause_s = min(0.2, 1.3 * pause_s)
        time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
    if is_silent:
        raise StartError(
            f"{launch}: something listens at {_where(launch)}, but it is not the store of a rank 0 of this run "
            f"({problem}; waited {timeout_s:g} s at most). Is the port that of another program? Choose another one, "
            "the same on all nodes"
        )
    here = " That address is this host itself." if addresses.is_local(launch.master_addr) else ""
    raise StartError(
        f"{launch}: nobody listens at {_where(launch)} after {timeout_s:g} s: {problem}.{here} The master "
        "address is that of the host where rank 0 runs (--nr 0), as the other hosts reach it; the port is the same on "
        f"all nodes. Was rank 0 started, and has it ended with an error?{left_over(launch)}"
    )


def _gone(launch: Launch, error: Exception) -> StartError:
    return StartError(
        f"{launch}: the store at {_where(launch)} went away while the ranks gathered: has rank 0 ended? Its "
        f"messages say why ({_first_line(error)})"
    )


def _where(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
