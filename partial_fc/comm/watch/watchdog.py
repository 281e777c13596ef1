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
from dataclasses import dataclass

from partial_fc import output
from partial_fc.comm.launch.detect import StartError
from partial_fc.comm.watch.board import ANSWER_S, END, HANG, RANK_0_HAS_LEFT, Board, Endpoint
from partial_fc.comm.watch.report import PeerState, Query, RankState, failure_report, hang_report
from partial_fc.comm.watch.stacks import code_of_main_thread, emit, stacks

EXIT_STATUS = 1
THREAD_NAME = "comm-watch"
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
        self._host, self._process = socket.gethostname(), os.getpid()
        self._ending_since = 0.0
        self._why_closed, self._why_rank_0_left = "", ""
        # The collective that the backend gave up, and how many had been started by then.
        self._failed = ("", 0)
        self._is_known, self._closed = threading.Event(), threading.Event()
        parts = (self._measure_waits, self._tell_states)
        self._threads = [
            threading.Thread(target=self._guarded, args=(part,), name=THREAD_NAME, daemon=True) for part in parts
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
        self._failed = call.name, self._journal.num_started
        _log.error(f"collective {call.name} failed, step {self._journal.step}: {backend_error}; asking the other ranks")
        return failure_report(self._query(call), self.peer_states(), backend_error, self._why_rank_0_left)

    def peer_states(self) -> list[PeerState] | None:
        """Returns the state of all ranks; None if the store does not answer."""
        try:
            board = None if self._why_rank_0_left else self._connect()
            return board.ask() if board else None
        except RuntimeError:  # DistError: the store is gone; or no thread can start
            return None

    def _connect(self) -> Board | None:
        store = self._endpoint.connect()
        return Board(store, self._journal.rank, self._journal.size, self._began) if store else None

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception:
            _log.exception(
                "the watch over collectives has ended by a fault of its own; one that hangs is not reported any more"
            )
        finally:
            self._is_known.set()

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
                if now - self._ending_since > 4 * ANSWER_S:
                    self._end("ends: a collective hangs, and nobody reported it in time")
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
        rank, board, peer_states = str(self._journal.rank), None, None
        try:
            if (board := self._connect()) and board.tell(HANG, rank) != rank:
                self._prepare_to_exit()  # that rank ends this one, or the time does
                return
            peer_states = board.ask() if board else None
        except RuntimeError:  # as in peer_states
            board = None
        self._prepare_to_exit()
        emit(self._journal.rank, hang_report(self._query(call), peer_states, self._why_rank_0_left), THREAD_NAME)
        if board:
            board.tell(END, rank)
            time.sleep(3 * self._look_every_s)  # the others read that; the store may be this process's
        output.drain()
        os._exit(EXIT_STATUS)

    # ---- in the thread that tells

    def _tell_states(self) -> None:
        import torch.distributed as dist

        try:
            if board := self._connect():
                self._tell(board)
                return
        except dist.DistError:  # rank 0 has ended
            if self._ending_since:
                time.sleep(1.0)
                self._end("ends: a rank reported a collective that hangs, and rank 0 has ended")
            return
        at = self._endpoint
        _log.warning(
            f"cannot reach the store of the run at {' or '.join(at.addresses)}, port {at.port}: a report of a hanging "
            "collective would not know where this rank is; give --network-interface, or open the firewall"
        )

    def _tell(self, board: Board) -> None:
        board.enter(self._state())
        self._is_known.set()
        asked, told = 0, time.monotonic()
        while not (self._closed.wait(self._look_every_s) or self._why_rank_0_left):
            number = board.num_asked()
            if number == asked and time.monotonic() - told < self._state_every_s:
                continue
            asked, told = number, time.monotonic()
            board.write(self._state())
            if board.told(HANG):
                self._prepare_to_exit()
            if (reporter := board.told(END)) not in ("", str(self._journal.rank)):
                self._end(f"ends, as rank {reporter} reported a collective that hangs")
            self._why_rank_0_left = board.told(RANK_0_HAS_LEFT)
        board.leave(self._state(self._why_closed), 3 * self._look_every_s)

    def _query(self, call: Call) -> Query:
        journal, waited_s = self._journal, max(0.0, call.waited_s)
        return Query(journal.rank, call.name, call.nth, call.number, journal.step, waited_s, journal.backend == "torch")

    def _state(self, goodbye: str = "") -> RankState:
        journal = self._journal
        waiting, newest = journal.oldest_in_flight(), journal.newest
        return RankState(
            rank=journal.rank,
            host=self._host,
            process=self._process,
            step=journal.step,
            num_started=journal.num_started,
            last=newest.name if newest else "",
            waits_for=waiting.name if waiting else "",
            waited_s=max(0.0, waiting.waited_s) if waiting else 0.0,
            started={name: [call.nth, call.number] for name, call in journal.newest_of.copy().items()},
            in_flight=[[call.name, call.nth] for call in list(journal.in_flight)],
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
        emit(self._journal.rank, stacks(THREAD_NAME), THREAD_NAME, on_stderr=not has_log_file)

    def _end(self, words: str) -> None:
        emit(self._journal.rank, words, THREAD_NAME)
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
