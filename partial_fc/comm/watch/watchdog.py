"""The watchdog: ends a process whose collective does not finish, and reports which ranks are missing.

It is two threads of each process. One reads from the journal which collective the process waits for, and for how long.
The other exchanges states with the other ranks over the run's store (board.py). After `timeout_s` in one collective the
rank asks all others for their states. The first to do so prints the report. All ranks log their Python stacks, and end.
"""

import atexit
import logging
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from partial_fc import output
from partial_fc.comm.launch.detect import StartError
from partial_fc.comm.watch.board import Board, Endpoint
from partial_fc.comm.watch.report import PeerState, Query, RankState, failure_report, hang_report
from partial_fc.comm.watch.stacks import code_of_main_thread, emit, stacks

EXIT_STATUS = 1
THREAD_NAME = "comm-watch"
_ANSWER_S = 3.0  # a rank that has not answered by then is unresponsive
_SAME_QUERY_S = 1.0  # all ranks may ask about a collective that fails: one query is enough
_FIRST_CONNECTION_S = 2.0  # time to connect at the start, so that the others know ranks that end at once
_log = logging.getLogger("partial_fc")
_open_watches: "set[Watch]" = set()
T = TypeVar("T")


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
        # Whoever serves the store answers some 5,000 looks a second, and as many states in a core's tenth.
        self._poll_s = max(0.25, journal.size / 2000)
        self._state_every_s = max(2.0, journal.size / 200)
        self._endpoint = endpoint
        self._host, self._process = socket.gethostname(), os.getpid()
        self._board: Board | None = None
        self._wanted: queue.SimpleQueue[tuple[Callable[[Board], Any], Future[Any]]] = queue.SimpleQueue()
        self._asked: dict[tuple[str, int], tuple[int, float]] = {}  # collective -> the newest query about it, and when
        self._state_sent = 0.0
        self._ending_since = 0.0
        self._why_rank_0_left = ""
        self._why_closed = ""
        # The collective that the backend gave up, and how many had been started by then.
        self._failed = ("", 0)
        self._tried_to_connect, self._closed = threading.Event(), threading.Event()
        try:
            self._threads = [
                threading.Thread(target=self._guarded, args=(part,), name=THREAD_NAME, daemon=True)
                for part in (self._measure_waits, self._talk)
            ]
            for thread in self._threads:
                thread.start()
        except Exception as error:
            self._closed.set()
            raise StartError(
                f"rank {journal.rank} of {journal.size}: the watch over collectives does not start: {error!r}. "
                "--comm-timeout 0 goes without it"
            ) from error
        self._tried_to_connect.wait(_FIRST_CONNECTION_S)
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
            time.sleep(5 * _ANSWER_S)
        self._failed = call.name, self._journal.num_started
        _log.error(f"collective {call.name} failed, step {self._journal.step}: {backend_error}; asking the other ranks")
        query = self._query(call, hangs=False)
        return failure_report(query, self.peer_states(call), backend_error, self._why_rank_0_left)

    def peer_states(self, call: Call) -> list[PeerState] | None:
        """Returns the state of all ranks with respect to a collective; None if the store does not answer."""
        query = self._query(call, hangs=False)
        return self._on_board(lambda board: self._ask(board, query))

    def _on_board(self, act: Callable[[Board], T]) -> T | None:
        """Returns what act(board) returns in the thread that talks to the store; None if the store does not answer."""
        answer: Future[T | None] = Future()
        self._wanted.put((act, answer))
        try:
            return answer.result(_ANSWER_S + 2.0) if self._threads[1].is_alive() else None
        except TimeoutError:
            return None

    def _guarded(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception:
            self._tried_to_connect.set()
            _log.exception(
                "the watch over collectives has ended by a fault of its own; one that hangs is not reported any more"
            )

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
                if now - self._ending_since > 4 * _ANSWER_S:
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
        query, rank = self._query(call, hangs=True), self._journal.rank
        first = self._on_board(Board.claim_hang)
        if first not in (None, rank):
            self._prepare_to_exit()  # that rank ends this one, or the time does
            return
        peer_states = None if first is None else self._on_board(lambda board: self._ask(board, query))
        self._prepare_to_exit()
        emit(rank, hang_report(query, peer_states, self._why_rank_0_left), THREAD_NAME)
        if peer_states is not None:
            self._on_board(lambda board: self._post(board, {"end": rank}))
            time.sleep(3 * self._poll_s)  # the others read that; the store may be this process's
        output.drain()
        os._exit(EXIT_STATUS)

    # ---- in the thread that talks to the store

    def _talk(self) -> None:
        import torch.distributed as dist

        if not (store := self._endpoint.connect()):
            self._tried_to_connect.set()
            at = self._endpoint
            _log.warning(
                f"cannot reach the store of the run at {' or '.join(at.addresses)}, port {at.port}: a report of a "
                "hanging collective would not know where this rank is; give --network-interface, or open the firewall"
            )
            return
        try:
            board = Board(store, self._journal.rank, self._journal.size)
            self._hear(board)
            self._tried_to_connect.set()
            while not (self._closed.is_set() or self._why_rank_0_left):
                self._act(board)
                self._hear(board)
            self._leave(board)
        except dist.DistError:  # rank 0 has ended
            self._tried_to_connect.set()
            if self._ending_since:
                time.sleep(1.0)
                self._end("ends: a rank reported a collective that hangs, and rank 0 has ended")

    def _act(self, board: Board) -> None:
        """Does what the other threads want; returns after a while."""
        try:
            act, answer = self._wanted.get(timeout=self._poll_s)
        except queue.Empty:
            return
        result = None
        try:
            result = act(board)
        finally:
            answer.set_result(result)

    def _hear(self, board: Board) -> None:
        if (now := time.monotonic()) - self._state_sent >= self._state_every_s:
            self._state_sent = now
            board.write_state(self._state())
        for number, event in board.news():
            if "query" in event:
                query = Query(**event["query"])
                self._asked[query.name, query.nth] = number, time.monotonic()
                board.write_state(self._state(query), number)
                if query.hangs:
                    self._prepare_to_exit()
            elif "end" in event and event["end"] != self._journal.rank:
                self._end(f"ends, as rank {event['end']} reported a collective that hangs")
            elif "rank_0_leaves" in event:
                self._why_rank_0_left = event["rank_0_leaves"]

    def _ask(self, board: Board, query: Query) -> list[PeerState]:
        """Asks all ranks about a collective; returns what they answer in time."""
        deadline = time.monotonic() + _ANSWER_S
        number = self._post(board, {"query": asdict(query)}, None if query.hangs else (query.name, query.nth))
        self._hear(board)
        board.write_state(self._state(query), number)
        while not board.answers_are_there(number) and time.monotonic() < deadline:
            time.sleep(0.02)
            self._hear(board)
        return board.peer_states(number)

    def _post(self, board: Board, event: dict[str, Any], same: tuple[str, int] | None = None) -> int:
        """Writes an event, unless there is a new query about the `same` collective; returns its number."""
        while True:
            self._hear(board)
            number, since = self._asked.get(same, (None, 0.0)) if same else (None, 0.0)
            if number is not None and time.monotonic() - since < _SAME_QUERY_S:
                return number
            if (number := board.post(event)) is not None:
                return number

    def _leave(self, board: Board) -> None:
        board.write_state(self._state())
        board.write_goodbye(self._why_closed or "rank 0 has left")
        if self._journal.rank == 0:  # the store may end with this process
            self._post(board, {"rank_0_leaves": self._why_closed})
            others, patience = list(range(1, self._journal.size)), time.monotonic() + 3 * self._poll_s
            while not board.have_left(others) and time.monotonic() < patience:
                time.sleep(0.02)

    def _query(self, call: Call, hangs: bool) -> Query:
        journal, waited_s = self._journal, max(0.0, call.waited_s)
        ordered = journal.backend == "torch"
        return Query(journal.rank, call.name, call.nth, call.number, journal.step, waited_s, hangs, ordered)

    def _state(self, query: Query | None = None) -> RankState:
        journal = self._journal
        waiting = journal.oldest_in_flight()
        state = RankState(
            rank=journal.rank,
            host=self._host,
            process=self._process,
            step=journal.step,
            num_started=journal.num_started,
            last=journal.newest.name if journal.newest else "",
            waits_for=waiting.name if waiting else "",
            waited_s=max(0.0, waiting.waited_s) if waiting else 0.0,
            failed=self._failed[0] if self._failed[1] == journal.num_started else "",
        )
        if query is not None:
            newest = journal.newest_of.get(query.name)
            state.has_started = newest is not None and newest.nth >= query.nth
            state.waits_in_it = any((c.name, c.nth) == (query.name, query.nth) for c in list(journal.in_flight))
            state.number = newest.number if newest and newest.nth == query.nth else 0
            state.code = code_of_main_thread()
        return state

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
