"""The rendezvous of ranks over torch.distributed, at the store of rank 0.

1. every rank shakes hands at the launch's master address, where rank 0 gives it the store's port
   if it knows the run's secret (auth/handshake.py), and connects to it; torchrun's agent has the store itself
2. every rank writes the size of its launch, its kind of device, and claims its number: two jobs that meet
   by mistake differ in the former or claim the same number
3. rank 0 sees all ranks there, with one kind of device: the outcome is "all here". It then stops answering handshakes
"""

import os
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from partial_fc import printable
from partial_fc.comm.auth.handshake import SECRET, Handshake, NoAnswer, NotRank0, connect
from partial_fc.comm.launch import Launch, addresses
from partial_fc.comm.launch.detect import LISTENING_SOCKET, StartError, devices_differ, expect, has_agent, left_over

_RETRY_S = 0.025  # to the second try to reach rank 0; then longer each time
_LINGER_S = 1.0  # rank 0 stays after a failure, so that the others can read the outcome in its store
_LATER_S = 10.0  # the others wait longer, as rank 0 knows which ranks are missing
_POLL_S = 0.05
_CHECKS_A_SECOND = 5000  # of all ranks together, as one of them hosts the store
_NOTICE_S = 10.0  # after which the missing ones are printed
_SOON_S = 2.0  # the same in a step of `srun --pty`
ALL_HERE = "all here"
_OUTCOME, _ADDRESS = "outcome", "address of rank 0"

_stores: dict[tuple[str, int], dist.Store] = {}
_num_meetings = 0


def meet(launch: Launch, timeout_s: float, device: str = "cpu", secret: str | None = None) -> dist.Store:
    """Returns the store of this launch, once all its ranks have joined. device: "cpu" or "cuda", equal on all of them,
    like the secret; None: that of the environment, if any.

    Raises StartError after timeout_s seconds at the latest (ranks other than 0: up to 10 more, so that rank 0 can name
    the missing ones); at once if ranks contradict each other.
    """
    global _num_meetings
    started, address, handshake = time.monotonic(), (launch.master_addr, launch.master_port), None
    if address not in _stores:
        secret = os.environ.get(SECRET, "") if secret is None else secret
        _stores[address], handshake = _open(launch, timeout_s, secret)
    _num_meetings += 1
    # torchrun's agent keeps its store when it restarts failed processes: they must not read the keys of the first.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}, meeting {_num_meetings}", _stores[address])
    try:
        left_s = max(1.0, started + timeout_s - time.monotonic())
        rank = _Rank(store, launch, device, timeout_s)
        outcome = rank.outcome_of_all(left_s)
    except dist.DistError as error:
        raise StartError(
            f"{launch}: the store at {_where(launch)} went away while the ranks gathered: has rank 0 ended? Its "
            f"messages say why ({_first_line(error)})"
        ) from None
    if handshake:
        handshake.close()
    if outcome != ALL_HERE:
        if launch.rank == 0:
            time.sleep(_LINGER_S)
        raise StartError(f"{launch}: {printable.name(outcome[:4000])}")
    if launch.master_addr == addresses.ANY and (interface := addresses.interface_of(rank.address_of_rank_0())):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # the way between the hosts; see start.py
    return store


class _Rank:
    """One rank at the rendezvous. timeout_s: the time for all to join."""

    def __init__(self, store: dist.Store, launch: Launch, device: str, timeout_s: float):
        self._store, self._launch, self._device, self._timeout_s = store, launch, device, timeout_s
        self._keys = [f"rank {rank}" for rank in range(launch.size)]
        self._key = self._keys[launch.rank]

    def outcome_of_all(self, left_s: float) -> str:
        """Returns the outcome, after left_s seconds (rank 0), or some more, at most."""
        if problem := self._claim():
            self._decide(problem)
            return problem  # if a job runs already, its outcome is "all here": only the newcomer fails
        leads, started = self._launch.rank == 0, time.monotonic()
        patience_s, is_noted = left_s if leads else left_s + _LATER_S, not leads
        poll_s = max(_POLL_S, len(self._keys) / _CHECKS_A_SECOND)
        while not (outcome := self._read(_OUTCOME)):
            waited_s = time.monotonic() - started
            if text := self._all_here() or (self._missing() if waited_s > patience_s else ""):
                return self._decide(text)
            if not is_noted and waited_s > (_SOON_S if self._in_pty() else _NOTICE_S):
                is_noted = True
                where, absent = _where(self._launch), ", ".join(self._absent())
                why = f". {self._remedy()}" if self._launch.launcher == "srun" else ""
                print(f"{self._launch} waits at {where} for {absent}{why}", file=sys.stderr, flush=True)
            time.sleep(poll_s)
        return outcome

    def address_of_rank_0(self) -> str:
        """Returns the address at which other hosts reach rank 0; "": there are none."""
        return self._read(_ADDRESS)

    def _claim(self) -> str:
        """Writes this rank's number, size and device; returns the error, or ""."""
        launch, host = self._launch, socket.gethostname()
        process = f"{host} (process {os.getpid()})"
        local_size = f"{launch.size} processes, says {self._key} on {host}"
        first_size = self._store.compare_set("size", "", local_size).decode()
        if first_size.split()[0] != str(launch.size):
            return (
                f"the ranks disagree on how many there are: {first_size}; {local_size}. Give every node the same "
                "--nodes (--num-shards) and --gpus, and every job a port of its own"
            )
        self._store.set(f"device of {self._key}", self._device)
        if launch.master_addr != addresses.ANY:
            self._store.set(_ADDRESS, launch.master_addr)
        holder = self._store.compare_set(self._key, "", process).decode()
        if holder != process:
            return (
                f"{self._key} is there twice: {holder} and {process}. Two nodes with the same --nr or --shard-id? Or "
                "two jobs with the same master address and port? Give each job a port of its own"
            )
        return ""

    def _decide(self, text: str) -> str:
        """Sets the outcome to `text`, unless there is one. Returns the one in effect."""
        return self._store.compare_set(_OUTCOME, "", text).decode(errors="replace")

    def _read(self, key: str) -> str:
        """Returns the key's value at once; "" if it is not set."""
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""

    def _all_here(self) -> str:
        """Returns the outcome on rank 0 if all ranks have joined; else ""."""
        if self._launch.rank != 0 or not self._store.check(self._keys):
            return ""
        devices = self._store.multi_get([f"device of {rank}" for rank in self._keys])
        return devices_differ([device.decode() for device in devices]) or ALL_HERE

    def _absent(self) -> list[str]:
        return [key for key in self._keys if not self._store.check([key])]

    def _missing(self) -> str:
        present = [f"{key}: {claim}" for key in self._keys if (claim := self._read(key))]
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


def _open(launch: Launch, timeout_s: float, secret: str) -> tuple[dist.Store, Handshake | None]:
    """Returns the store, and on rank 0 the handshake that leads to it."""
    if launch.rank == 0 and not has_agent():
        return _host(launch, timeout_s, secret)
    if has_agent():
        expect(launch, "store of torchrun", launch.master_addr, launch.master_port)
    port = launch.master_port if has_agent() else _ask_rank_0(launch, timeout_s, secret)
    left = timedelta(seconds=max(1.0, timeout_s))
    try:
        return dist.TCPStore(launch.master_addr, port, None, False, left), None
    except dist.DistError as error:
        raise _not_rank_0(launch, timeout_s, _first_line(error)) from None


def _host(launch: Launch, timeout_s: float, secret: str) -> tuple[dist.Store, Handshake]:
    """Returns rank 0's store, at a port of its own, and the handshake that leads to it, at the master's."""
    given = os.environ.pop(LISTENING_SOCKET, None)
    try:
        listening = socket.socket(fileno=int(given)) if given else _listen(launch)
        own = listening.getsockname()[0]
        store_socket = _server(own, 0)
    except OSError as error:
        raise StartError(
            f"{launch}: cannot listen at port {launch.master_port} ({_first_line(error)}). Does another job or "
            "program use it? Choose another one (--master-port or MASTER_PORT), the same on all nodes"
        ) from None
    port = store_socket.getsockname()[1]
    handshake = Handshake(listening, port, secret, launch.size)
    address = "127.0.0.1" if own in ("0.0.0.0", "::") else own
    left, descriptor = timedelta(seconds=timeout_s), store_socket.detach()
    return dist.TCPStore(
        address, port, None, True, left, wait_for_workers=False, master_listen_fd=descriptor
    ), handshake


def _listen(launch: Launch) -> socket.socket:
    """Listens at the master address; at all addresses if that is not this host's (behind address translation, or by
    mistake, which shows later), or if its name resolves to the loopback here, as Debian sets it up."""
    name = launch.master_addr
    try:
        resolved = {entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        resolved = set()
    loops = any(str(address).startswith("127.") or address == "::1" for address in resolved)
    # Kubeflow's first operator gives "localhost" to the master.
    if resolved and not (loops and (name not in (*resolved, "localhost") or launch.local_size < launch.size)):
        address = str(min(resolved, key=lambda a: ":" in str(a)))  # IPv4, if it has both
        if addresses.is_local(address):
            return _server(address, launch.master_port)
    return _server("", launch.master_port)


def _server(address: str, port: int) -> socket.socket:
    if address in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=128)


def _ask_rank_0(launch: Launch, timeout_s: float, secret: str) -> int:
    """Returns the port of the store, once rank 0 answers at the master's address. Raises StartError."""
    deadline, pause_s = time.monotonic() + timeout_s, _RETRY_S
    problem, silent = "no answer", False
    while (left := deadline - time.monotonic()) > 0:
        silent = False
        try:
            return connect(launch.master_addr, launch.master_port, secret, left)
        except NotRank0 as error:
            raise _not_rank_0(launch, timeout_s, str(error)) from None
        except NoAnswer as error:
            problem, silent = str(error), True
        except TimeoutError:
            problem = "no answer: is a firewall between the hosts, or the address wrong?"
        except socket.gaierror as error:
            problem = f"this host does not know the name ({error.strerror})"
        except OSError as error:
            problem = error.strerror or str(error)
        # Rank 0 may come up soon: it may have been restarted at the same time.
        pause_s = min(0.2, 1.3 * pause_s)
        time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
    if silent:
        raise _not_rank_0(launch, timeout_s, problem)
    here = " That address is this host itself." if addresses.is_local(launch.master_addr) else ""
    raise StartError(
        f"{launch}: nobody listens at {_where(launch)} after {timeout_s:g} s: {problem}.{here} The master "
        "address is that of the host where rank 0 runs (--nr 0), as the other hosts reach it; the port is the same on "
        f"all nodes. Was rank 0 started, and has it ended with an error?{left_over(launch)}"
    )


def _not_rank_0(launch: Launch, timeout_s: float, why: str) -> StartError:
    return StartError(
        f"{launch}: something listens at {_where(launch)}, but it is not the store of a rank 0 of this run ({why}; "
        f"waited {timeout_s:g} s at most). Is the port that of another program? Choose another one, the same on all "
        "nodes"
    )


def _where(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
