"""The start of a launch over torch.distributed: the ranks meet at the store of rank 0, or each says why they did not.

Steps, from the second on through keys of that store:
1. every rank knocks at the launch's master address, where rank 0 tells who knows the run's secret where its store is
   (strangers/gate.py), and connects to that; under torchrun the store is its agent's, and at the master address itself
2. every rank writes the size of its launch and claims its number: two jobs that meet by mistake differ in the one or
   claim the other twice; the kind of device that it computes on, and its host's addresses
3. rank 0 sees all ranks there, with one kind of device, and writes the verdict "all here"; or some rank writes what is
   wrong; the first verdict holds for all. Rank 0 does not answer knocks any more
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from partial_fc import printable
from partial_fc.comm.auth.handshake import SECRET, Gate, NoAnswer, NotRank0, knock
from partial_fc.comm.launch import addresses
from partial_fc.comm.launch.detect import LISTENING_SOCKET, Launch, StartError, devices_differ, has_agent

_ALL_HERE = "all here"
_POLL_S = 0.05
_NOTICE_S = 10.0  # after which rank 0 prints for whom it waits
_LINGER_S = 1.0  # rank 0 stays after a failure, for the others to read the verdict: the store ends with it
_LATER_S = 10.0  # the others wait so much longer: rank 0 knows best who is missing

_stores: dict[tuple[str, int], dist.Store] = {}
_gates: list[Gate] = []  # of rank 0, while the ranks meet
_num_meetings = 0
T = TypeVar("T")


def meet(launch: Launch, timeout_s: float, device: str = "cpu", secret: str | None = None) -> dist.Store:
    """The store of this launch, once all its ranks are there. device: "cpu" or "cuda", equal on all of them; so is the
    secret, None: that of the environment, if any.

    Raises StartError after timeout_s seconds at the latest (ranks other than 0: up to 10 more, so that rank 0 can say
    who is missing); at once where ranks contradict each other.
    """
    global _num_meetings
    deadline = time.monotonic() + timeout_s
    address = (launch.master_addr, launch.master_port)
    if address not in _stores:
        _stores[address] = _open(launch, timeout_s, deadline, os.environ.get(SECRET, "") if secret is None else secret)
    _num_meetings += 1
    # torchrun's agent keeps its store when it starts failed processes again: they must not read what the first wrote.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}, meeting {_num_meetings}", _stores[address])
    try:
        problem = _claim_rank(store, launch, device)
        if problem:
            _write_verdict(store, problem)
        # Where a job runs already, its verdict is "all here": the newcomer alone fails, by its own finding.
        verdict = problem or _verdict(store, launch, timeout_s, deadline)
        while _gates:
            _gates.pop().close()
    except dist.DistError as error:
        raise StartError(
            f"{launch}: the store at {_where(launch)} went away while the ranks gathered: has rank 0 ended? Its "
            f"messages say why ({_first_line(error)})"
        ) from None
    if verdict != _ALL_HERE:
        if launch.rank == 0:
            time.sleep(_LINGER_S)
        raise StartError(f"{launch}: {printable.name(verdict[:4000])}")
    return store


def _open(launch: Launch, timeout_s: float, deadline: float, secret: str) -> dist.Store:
    if has_agent():
        _patiently(launch, timeout_s, deadline, lambda left: _connects(launch, left))
        return _connect(launch, launch.master_port, timeout_s, deadline)
    if launch.rank == 0:
        return _host(launch, timeout_s, secret)

    def at_the_gate(left: float) -> int:
        return knock(launch.master_addr, launch.master_port, secret, left)

    return _connect(launch, _patiently(launch, timeout_s, deadline, at_the_gate), timeout_s, deadline)


def _connect(launch: Launch, port: int, timeout_s: float, deadline: float) -> dist.Store:
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    results: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            results.append(dist.TCPStore(launch.master_addr, port, None, False, left))
        except Exception as error:  # for the thread that waits
            results.append(error)

    # The constructor waits for ever at a server that accepts and says nothing: its own timeout does not cover that.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(left.total_seconds())
    result = results[0] if results else "no answer"
    if isinstance(result, dist.Store):
        return result
    raise _not_rank_0(launch, timeout_s, _first_line(result))


def _not_rank_0(launch: Launch, timeout_s: float, why: str) -> StartError:
    return StartError(
        f"{launch}: something listens at {_where(launch)}, but it is not the store of a rank 0 of this run ({why}; "
        f"waited {timeout_s:g} s at most). Is the port that of another program? Choose another one, the same on all "
        "nodes"
    )


def _host(launch: Launch, timeout_s: float, secret: str) -> dist.Store:
    """The store of rank 0, at a port of its own, and the gate to it, at the master's."""
    given = os.environ.pop(LISTENING_SOCKET, None)
    try:
        listening = socket.socket(fileno=int(given)) if given else _listen(launch)
        own = listening.getsockname()[0]
        listening_store = _server(own, 0)
    except OSError as error:
        raise StartError(
            f"{launch}: cannot listen at port {launch.master_port} ({_first_line(error)}). Does another job or "
            "program use it? Choose another one (--master-port or MASTER_PORT), the same on all nodes"
        ) from None
    port = listening_store.getsockname()[1]
    _gates.append(Gate(listening, port, secret, launch.size))
    address = "127.0.0.1" if own in ("0.0.0.0", "::") else own
    left, descriptor = timedelta(seconds=timeout_s), listening_store.detach()
    return dist.TCPStore(address, port, None, True, left, wait_for_workers=False, master_listen_fd=descriptor)


def _listen(launch: Launch) -> socket.socket:
    """At the master address alone; at all where that is none of this host (behind address translation, or by mistake,
    which shows later), or its name means the loopback here and this host elsewhere, as Debian writes it."""
    name = launch.master_addr
    try:
        resolved = {entry[4][0] for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        resolved = set()
    loops = any(str(address).startswith("127.") or address == "::1" for address in resolved)
    if resolved and not (loops and name not in (*resolved, "localhost")):
        address = str(min(resolved, key=lambda a: ":" in str(a)))  # IPv4, where it has both
        if addresses.is_local(address):
            return _server(address, launch.master_port)
    return _server("", launch.master_port)


def _server(address: str, port: int) -> socket.socket:
    if address in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=128)


def _connects(launch: Launch, timeout_s: float) -> None:
    socket.create_connection((launch.master_addr, launch.master_port), timeout=min(timeout_s, 10.0)).close()


def _patiently(launch: Launch, timeout_s: float, deadline: float, attempt: Callable[[float], T]) -> T:
    """What attempt(seconds left) returns, once somebody answers at the master's address. (TCPStore would wait, too, but
    fills the terminal with its own stack for every attempt and does not say what went wrong.)"""
    problem, silent, pause_s = "no answer", False, _POLL_S / 2
    while (left := deadline - time.monotonic()) > 0:
        silent = False
        try:
            return attempt(left)
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
        # Rank 0 may be there in a moment: one that was started again, at the same time.
        pause_s = min(0.2, 1.3 * pause_s)
        time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
    if silent:
        raise _not_rank_0(launch, timeout_s, problem)
    here = " That address is this host itself." if addresses.is_local(launch.master_addr) else ""
    raise StartError(
        f"{launch}: nobody listens at {_where(launch)} after {timeout_s:g} s: {problem}.{here} The master "
        "address is that of the host where rank 0 runs (--nr 0), as the other hosts reach it; the port is the same on "
        "all nodes. Was rank 0 started, and has it ended with an error?"
    )


def _claim_rank(store: dist.Store, launch: Launch, device: str) -> str:
    """Writes this rank's number, size and device; returns what is wrong, or nothing."""
    process = f"{socket.gethostname()} (process {os.getpid()})"
    local_size = f"{launch.size} processes, says rank {launch.rank} on {socket.gethostname()}"
    first_size = store.compare_set("size", "", local_size).decode()
    if first_size.split()[0] != str(launch.size):
        return (
            f"the ranks disagree on how many there are: {first_size}; {local_size}. Give every node the same --nodes "
            "and --gpus, and every job a port of its own"
        )
    store.set(f"device of rank {launch.rank}", device)
    holder = store.compare_set(f"rank {launch.rank}", "", process).decode()
    if holder != process:
        return (
            f"rank {launch.rank} is there twice: {holder} and {process}. Two nodes with the same --nr? Or two jobs "
            "with the same master address and port? Give each job a port of its own"
        )
    return ""


def _verdict(store: dist.Store, launch: Launch, timeout_s: float, deadline: float) -> str:
    """Waits for the verdict, which rank 0 writes, and any rank where time is over."""
    ranks = [f"rank {rank}" for rank in range(launch.size)]
    if launch.rank != 0:
        try:
            store.wait(["verdict"], timedelta(seconds=max(1.0, deadline - time.monotonic()) + _LATER_S))
        except dist.DistStoreError:  # nobody wrote one in time
            return _write_verdict(store, _missing(store, ranks, launch, timeout_s))
        return store.get("verdict").decode()
    notice_at = time.monotonic() + _NOTICE_S
    while not store.check(["verdict"]):
        if store.check(ranks):
            devices = [kind.decode() for kind in store.multi_get([f"device of {rank}" for rank in ranks])]
            return _write_verdict(store, devices_differ(devices) or _ALL_HERE)
        now = time.monotonic()
        if now > deadline:
            return _write_verdict(store, _missing(store, ranks, launch, timeout_s))
        if now > notice_at:
            notice_at = deadline + 1
            absent = ", ".join(_absent(store, ranks))
            print(f"{launch} waits at {_where(launch)} for {absent}", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
    return store.get("verdict").decode()


def _write_verdict(store: dist.Store, text: str) -> str:
    """Makes `text` the verdict, unless there is one; returns that which holds."""
    return store.compare_set("verdict", "", text).decode()


def _missing(store: dist.Store, ranks: list[str], launch: Launch, timeout_s: float) -> str:
    """The verdict where not all have come: who has, who has not, and what may be wrong."""
    absent = _absent(store, ranks)
    present = [f"{rank}: {store.get(rank).decode()}" for rank in ranks if rank not in absent]
    text = (
        f"{_listed(absent)} did not come within {timeout_s:g} s to {_where(launch)}. There are: "
        f"{_listed(present)}. Was the command started on every node, each with its own --nr, all with the same master "
        "address and port, and do their messages say why they ended?"
    )
    if launch.rank == 0 and not addresses.is_local(launch.master_addr):
        text += f" {launch.master_addr} is no address of {socket.gethostname()}, where rank 0 runs."
    elif launch.master_addr in ("localhost", "127.0.0.1", "::1") and launch.size > launch.local_size:
        text += f" {launch.master_addr} means every host itself: other hosts need the address of this one."
    return text


def _absent(store: dist.Store, ranks: list[str]) -> list[str]:
    return [rank for rank in ranks if not store.check([rank])]


def _listed(items: list[str], most: int = 16) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _where(launch: Launch) -> str:
    return f"{launch.master_addr}:{launch.master_port}"


def _first_line(error: Exception | str) -> str:
    return str(error).splitlines()[0][:200]
