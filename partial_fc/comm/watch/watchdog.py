"""The watchdog: ends a process whose collective does not finish, and reports which ranks are missing.

It is two threads of each process. One reads from the journal which collective the process waits for, and for how long.
The other writes the rank's state into the run's store (board.py). After `timeout_s` in one collective the rank asks all
others for their newest state. The first to do so prints the report. All ranks log their Python stacks, and end.
"""

import atexit
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from partial_fc import output
from partial_fc.comm.launch.detect import StartError
from partial_fc.comm.watch.board import ANSWER_S, Board, Endpoint, own_namespace
from partial_fc.comm.watch.report import PeerState, RankState, report
from partial_fc.comm.watch.stacks import THREAD_NAME, code_of_main_thread, emit, stacks

EXIT_STATUS = 1
_FIRST_CONNECTION_S = 2.0  # time to connect at the start, so that the others know ranks that end at once
_log = logging.getLogger("partial_fc")
_open_watches: "set[Watch]" = set()


@dataclass(eq=False, slots=True)
class Call:
    """One collective of this rank."""

    name: str
    nth: int  # among those of this name, from 1: (name, nth) identifies a collective on all ranks
    number: int  # among all collectives of this rank, from 1: torch.distributed matches by it
    waited_s: float = -1.0  # measured by the watchdog, which has not seen it yet
    done: Callable[[], bool] | None = None  # set if a GPU continues it after the host has waited


class Journal:
    """The collectives of this process, written by the threads that communicate, read by the watchdog. Lock-free: each
    write is one operation on a dict or set, which is atomic in the interpreter."""

    def __init__(self, rank: int = 0, size: int = 1, backend: str = "single") -> None:
        self.rank = rank
        self.size = size
        self.backend = backend
        self.step = 0  # the current update, from 1
        self.num_started = 0
        self.newest: Call | None = None
        self.newest_of: dict[str, Call] = {}  # by name
        self.in_flight: set[Call] = set()  # a thread waits for their start or end

    def begin(self, name: str) -> Call:
        """Records that a collective is handed to the backend, which may already block."""
        before = self.newest_of.get(name)
        self.num_started += 1
        call = Call(name, before.nth + 1 if before else 1, self.num_started)
        self.newest = self.newest_of[name] = call
        self.in_flight.add(call)
        return call

    def oldest_in_flight(self) -> Call | None:
        """Returns the oldest call that a thread waits for."""
        return min(list(self.in_flight), key=lambda call: call.number, default=None)


class Watch:
    """The watchdog of this process's collectives."""

    def __init__(self, journal: Journal, timeout_s: float, endpoint: Endpoint):
        """Raises StartError if a thread cannot start."""
        self._journal = journal
        self._timeout_s = timeout_s
        self._tick_s = min(1.0, timeout_s / 8)
        # Whoever serves the store answers at most 4,000 looks and 200 states a second.
        self._look_every_s = max(0.25, journal.size / 4000)
        self._state_every_s = max(2.0, journal.size / 200)
        self._endpoint = endpoint
        self._began = time.monotonic()
        self._process = os.getpid()
        self._ending_since = 0.0
        self._why_closed = ""
        # The collective that the backend gave up, and how many had been started by then.
        self._failed = ("", 0)
        self._is_known, self._closed = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=part, name=THREAD_NAME, daemon=True)
            for part in (self._measure_waits, self._tell_states)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            self._closed.set()
            raise StartError(
                f"rank {journal.rank} of {journal.size}: the watch over collectives does not start: {error!r}. "
                "--comm-timeout 0 goes without it"
            ) from error
        self._is_known.wait(_FIRST_CONNECTION_S)
        _open_watches.add(self)
        atexit.register(_on_interpreter_exit)  # after the backend's own handlers, so it is called before them

    def close(self, why: str = "it closed its world") -> None:
        """Tells the others why this rank leaves, and ends the threads."""
        if self._closed.is_set() or os.getpid() != self._process:
            return
        self._why_closed = why
        self._closed.set()
        _open_watches.discard(self)
        for thread in self._threads:
            thread.join(5.0)

    def describe_failure(self, call: Call, backend_error: str) -> str:
        """Returns the message for a collective that the backend gave up. Asks the others for some seconds at most."""
        if self._ending_since:
            # The backend noticed that another rank has ended, as this one will at once: nothing is left to report.
            time.sleep(5 * ANSWER_S)
        rank, step = self._journal.rank, self._journal.step
        self._failed = call.name, self._journal.num_started
        _log.error(f"collective {call.name} failed, step {step}: {backend_error}; asking the other ranks")
        peers = self.peer_states()
        others = None if peers is None else [peer for peer in peers if peer.rank != rank]
        where = f"on rank {rank}, step {step}, call {call.nth} of that name"
        return report(f"collective {call.name} failed {where}: {backend_error}", call.name, call.nth, others)

    def peer_states(self) -> list[PeerState] | None:
        """Returns the state of all ranks; None if the store does not answer."""
        with suppress(RuntimeError):  # DistError: the store is gone; or no thread can start
            if board := self._connect():
                return board.ask()
        return None

    def _connect(self) -> Board | None:
        store = self._endpoint.connect()
        return Board(store, self._journal.rank, self._journal.size, self._began) if store else None

    # ---- in the thread that measures

    def _measure_waits(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self._tick_s):
            now = time.monotonic()
            # Time in which the process was stopped does not count.
            passed, before = min(now - before, 2 * self._tick_s), now
            self._count_waiting(passed)
            call = self._journal.oldest_in_flight()
            if self._ending_since:
                if now - self._ending_since > 2 * ANSWER_S:  # whoever reports has what it asked for
                    self._end("ends, as another rank reports a collective that hangs")
            elif call and call.waited_s >= self._timeout_s:
                self._report(call)

    def _count_waiting(self, passed_s: float) -> None:
        for call in list(self._journal.in_flight):
            if call.done is not None and _is_done(call.done):
                self._journal.in_flight.discard(call)
            elif call.waited_s < 0:  # first seen now: its start is unknown
                call.waited_s = 0.0
            else:
                call.waited_s += passed_s

    def _report(self, call: Call) -> None:
        peers, journal = None, self._journal
        with suppress(RuntimeError):  # as in peer_states
            if board := self._connect():
                if not board.claim_hang():
                    self._prepare_to_exit()
                    return
                peers = board.ask()
        head = (
            f"collective {call.name} has not finished after {call.waited_s:.0f} s. Step {journal.step}; "
            f"call {call.nth} of that name, collective number {call.number} of rank {journal.rank}"
        )
        self._end(report(head, call.name, call.nth, peers))

    # ---- in the thread that tells

    def _tell_states(self) -> None:
        import torch.distributed as dist

        if board := self._connect():
            with suppress(dist.DistError):  # rank 0 has ended
                self._tell(board)
            return
        at = self._endpoint
        _log.warning(
            f"cannot reach the store of the run at {' or '.join(at.addresses)}, port {at.port}: a report of a hanging "
            "collective would not know where this rank is; give --network-interface, or open the firewall"
        )

    def _tell(self, board: Board) -> None:
        board.write(self._state())
        self._is_known.set()
        asked, told = 0, time.monotonic()
        while not self._closed.wait(self._look_every_s):
            number = board.num_asked()
            if number == asked and time.monotonic() - told < self._state_every_s:
                continue
            asked, told = number, time.monotonic()
            board.write(self._state())
            if board.hangs():
                self._prepare_to_exit()
        board.leave(self._state(self._why_closed), 3 * self._look_every_s)

    def _state(self, goodbye: str = "") -> RankState:
        journal = self._journal
        waiting, newest = journal.oldest_in_flight(), journal.newest
        return RankState(
            rank=journal.rank,
            host=socket.gethostname(),
            process=self._process,
            namespace=own_namespace(),
            step=journal.step,
            num_started=journal.num_started,
            last=newest.name if newest else "",
            waits_for=waiting.name if waiting else "",
            waited_s=max(0.0, waiting.waited_s) if waiting else 0.0,
            started={name: call.nth for name, call in journal.newest_of.copy().items()},
            failed=self._failed[0] if self._failed[1] == journal.num_started else "",
            code=code_of_main_thread(),
            goodbye=goodbye,
        )

    # ---- the end

    def _prepare_to_exit(self) -> None:
        if self._ending_since:
            return
        self._ending_since = time.monotonic()
        has_log_file = any(isinstance(handler, logging.FileHandler) for handler in _log.handlers)
        emit(self._journal.rank, stacks(), on_stderr=not has_log_file)

    def _end(self, words: str) -> None:
        self._prepare_to_exit()
        emit(self._journal.rank, words)
        time.sleep(3 * self._look_every_s)  # the others see that they are to end; the store may be this process's
        output.drain()
        os._exit(EXIT_STATUS)


def report_failure(error: BaseException) -> None:
    """Tells the other ranks why this process is about to end, if its world is watched. For programs that catch the
    error, print it and end by os._exit; a normal exit of the interpreter reports it already."""
    for watch in list(_open_watches):
        watch.close(f"it failed; {_in_one_line(error)}")


def _on_interpreter_exit() -> None:
    error = getattr(sys, "last_value", None)
    why = _in_one_line(error) if error is not None else "its output says why"
    for watch in list(_open_watches):
        watch.close(f"its Python ended without closing the world; {why}")


def _in_one_line(error: BaseException) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())[:1000]


def _is_done(done: Callable[[], bool]) -> bool:
    try:
        return done()
    except RuntimeError:  # of the device; the main thread gets it too, and raises it
        return True
