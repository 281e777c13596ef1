"""The watchdog: ends a process whose collective does not finish, and reports which ranks are missing.

It is a thread of each process. Once a second it reads from the journal which collective the process waits for. It keeps
a connection to the status server of rank 0 (status_server.py). After `timeout_s` in one collective it queries the
server for the other ranks' states. The first to do so prints the report. All ranks log their Python stacks, and end.
"""

import asyncio
import atexit
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from partial_fc import output
from partial_fc.comm.auth.handshake import end, read_line
from partial_fc.comm.launch.detect import StartError
from partial_fc.comm.watch.report import PeerState, Query, RankState, failure_report, hang_report
from partial_fc.comm.watch.stacks import code_of_main_thread, emit, stacks
from partial_fc.comm.watch.status_server import (
    ANSWER_S,
    Endpoint,
    StatusServer,
    join,
    log_fault_of,
    parse_peer_states,
    send,
)

EXIT_STATUS = 1
THREAD_NAME = "comm-watch"
_CONNECT_S = 5.0
_FIRST_CONNECTION_S = 2.0  # time to connect at the start, so that the server knows ranks that end at once
_GIVE_A_WARNING = 3  # failures to reach the server
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

    def __init__(self, journal: Journal, timeout_s: float, endpoint: Endpoint, server: StatusServer | None = None):
        """endpoint: of the status server; server: on rank 0, the server itself, which runs in this thread.

        Raises StartError if the thread cannot start.
        """
        self._journal = journal
        self._timeout_s = timeout_s
        self._tick_s = min(1.0, timeout_s / 8)
        self._state_every_s = max(2.0, journal.size / 200)  # rank 0 reads at most 200 states a second
        self._endpoint = endpoint
        self._server = server
        self._host, self._process = socket.gethostname(), os.getpid()
        self._writer: asyncio.StreamWriter | None = None
        self._asking = asyncio.Lock()
        self._reply: asyncio.Future[dict[str, Any] | None] | None = None
        self._ending = False
        self._why_rank_0_left = ""
        # The collective that the backend gave up, and how many had been started by then.
        self._failed = ("", 0)
        self._tried_to_connect = threading.Event()
        self._is_closed = False
        try:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            self._thread.start()
            self._tasks = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except Exception as error:
            raise StartError(
                f"rank {journal.rank} of {journal.size}: the watch over collectives does not start: {error!r}. "
                "--comm-timeout 0 goes without it"
            ) from error
        self._tried_to_connect.wait(_FIRST_CONNECTION_S)
        _open_watches.add(self)
        atexit.register(_on_interpreter_exit)  # after the backend's own handlers, so it is called before them

    def close(self, why: str = "it closed its world") -> None:
        """Reports to the server why this rank leaves. The thread ends, except rank 0's, which runs the server."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        _open_watches.discard(self)
        # Imperceptible to a person; if the message does not arrive in that time, the closed connection says it.
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._leave(why), self._loop).result(5.0)
        if self._server is None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)

    def describe_failure(self, call: Call, backend_error: str) -> str:
        """Returns the message for a collective that the backend gave up. Queries the server for some seconds at
        most."""
        if self._ending:
            # The backend noticed that another rank has ended, as this one will at once: nothing is left to report.
            time.sleep(5 * ANSWER_S)
        self._failed = call.name, self._journal.num_started
        _log.error(f"collective {call.name} failed, step {self._journal.step}: {backend_error}; asking the other ranks")
        query = self._query(call, hangs=False)
        return failure_report(query, self.peer_states(call), backend_error, self._why_rank_0_left)

    def peer_states(self, call: Call) -> list[PeerState] | None:
        """Returns the state of all ranks with respect to a collective; None if the server does not answer."""
        asking = asyncio.run_coroutine_threadsafe(self._ask(self._query(call, hangs=False)), self._loop)
        try:
            return parse_peer_states(asking.result(2 * ANSWER_S))
        except TimeoutError:
            return None

    # ---- in the thread

    def _run(self) -> None:
        self._loop.run_forever()
        end(self._loop)

    async def _start(self) -> list[asyncio.Task[None]]:
        if self._server:
            await self._server.serve()
        tasks = [self._loop.create_task(part()) for part in (self._keep_connected, self._measure_waits)]
        for task in tasks:
            log_fault_of(
                task,
                "the watch over collectives has ended by a fault of its own; one that hangs is not reported any more",
            )
        return tasks

    async def _leave(self, why: str) -> None:
        if self._server:
            self._server.announce_exit_of_rank_0(why)
        if self._writer is not None:
            send(self._writer, {"state": asdict(self._state())})
            send(self._writer, {"bye": why})
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._writer.drain(), 1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _keep_connected(self) -> None:
        failures = 0  # before the first connection
        while True:
            connection = await join(self._endpoint, self._state(), _CONNECT_S)
            self._tried_to_connect.set()
            if connection is not None:
                failures = _GIVE_A_WARNING
                await self._listen(*connection)
            elif failures < _GIVE_A_WARNING:
                failures += 1
                if failures == _GIVE_A_WARNING:
                    i = self._endpoint
                    _log.warning(
                        f"cannot reach the status server of rank 0 at {' or '.join(i.addresses)}, port {i.port}: a "
                        "report of a hanging collective would not know where this rank is; "
                        "give --network-interface, or open the firewall"
                    )
            await asyncio.sleep(self._state_every_s)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        try:
            while line := await read_line(reader):
                self._handle(json.loads(line))
        except OSError:
            pass  # the connection has ended otherwise
        finally:
            self._writer = None
            writer.close()
            if self._reply and not self._reply.done():
                self._reply.set_result(None)
        if self._ending:  # rank 0 has ended before its goodbye arrived
            await asyncio.sleep(1.0)
            self._end("ends: a rank reported a collective that hangs, and rank 0 has ended")

    def _handle(self, message: dict[str, Any]) -> None:
        if "query" in message:
            query = Query(**message["query"])
            send(self._writer, {"answer": message["answer"], "state": asdict(self._state(query))})
            if query.hangs:
                self._prepare_to_exit(query)
        elif "end" in message:
            if message["end"] != self._journal.rank:
                self._end(f"ends, as rank {message['end']} reported a collective that hangs")
        elif "rank_0_leaves" in message:
            self._why_rank_0_left = message["rank_0_leaves"]
        elif self._reply and not self._reply.done():
            self._reply.set_result(message)

    async def _measure_waits(self) -> None:
        before = last_sent = time.monotonic()
        while True:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            # Time in which the process was stopped does not count.
            passed, before = min(now - before, 2 * self._tick_s), now
            self._count_waiting(passed)
            call = self._journal.oldest_in_flight()
            if call and call.waited_s >= self._timeout_s:
                await self._report(call)
            if now - last_sent >= self._state_every_s and self._writer:
                last_sent = now
                if self._writer.transport.get_write_buffer_size() < 1 << 16:  # else rank 0 does not read
                    send(self._writer, {"state": asdict(self._state())})

    def _count_waiting(self, passed_s: float) -> None:
        for call in list(self._journal.in_flight):
            if call.done is not None and _is_done(call.done):
                self._journal.in_flight.discard(call)
            elif call.waited_s < 0:  # first seen now: its start is unknown
                call.waited_s = 0.0
            else:
                call.waited_s += passed_s

    async def _report(self, call: Call) -> None:
        query = self._query(call, hangs=True)
        answer = await self._ask(query)
        if answer and "asked_by" in answer:
            self._prepare_to_exit(query)
            await asyncio.Event().wait()  # the server, or the timer of _prepare_to_exit, ends it
        self._prepare_to_exit(query)
        report = hang_report(query, parse_peer_states(answer), self._why_rank_0_left)
        emit(self._journal.rank, report, THREAD_NAME)
        if self._writer:
            send(self._writer, {"reported": ""})
            await asyncio.sleep(0.5)  # the others receive the end message
        output.drain()
        os._exit(EXIT_STATUS)

    async def _ask(self, query: Query) -> dict[str, Any] | None:
        """Queries the server for all ranks' states; returns None if it does not answer. If a rank reports a hang
        already, the answer is "asked_by" that rank."""
        async with self._asking:
            if self._writer is None:
                return None
            self._reply = self._loop.create_future()
            send(self._writer, {"ask": asdict(query)})
            try:
                return await asyncio.wait_for(self._reply, ANSWER_S + 2.0)
            except TimeoutError:
                return None

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

    def _prepare_to_exit(self, query: Query) -> None:
        if self._ending:
            return
        self._ending = True
        has_log_file = any(isinstance(handler, logging.FileHandler) for handler in _log.handlers)
        emit(self._journal.rank, stacks(THREAD_NAME), THREAD_NAME, on_stderr=not has_log_file)
        words = f"ends: collective {query.name} hangs, and nobody reported it in time"
        self._loop.call_later(4 * ANSWER_S, self._end, words)

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
