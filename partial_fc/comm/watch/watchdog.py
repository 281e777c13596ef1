"""Ends a process whose collective does not finish, and says which ranks are missing.

One thread a process. It looks every second at what the journal says this process waits for, and keeps a connection to
the status board of rank 0 (board.py). After `timeout_s` in one collective it asks the board where the others are. The
first rank that asks prints the report; all ranks write their Python stacks to their logs, and end.

Nothing is sent while a collective runs; a waiting process costs nothing but this thread's second hand.
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
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from partial_fc.comm.journal import Call
from partial_fc.comm.launch.detect import StartError
from partial_fc.comm.watch.board import ANSWER_S, Board, Invitation, join, seen_from, send
from partial_fc.comm.watch.report import Place, Question, Seen, failure_report, hang_report
from partial_fc.comm.watch.stacks import code_of_main_thread, say, stacks

if TYPE_CHECKING:
    from partial_fc.comm.world import World

EXIT_STATUS = 1
THREAD_NAME = "comm-watch"
_CONNECT_S = 5.0
_FIRST_CONNECTION_S = 2.0  # waited for at the start, so that a rank which ends at once has been there
_GIVE_A_WARNING = 3  # failures to reach the board
_log = logging.getLogger("partial_fc")
_open_watches: "set[Watch]" = set()  # of this process


class Watch:
    """Of one process. `board` is that of rank 0, elsewhere None."""

    def __init__(self, world: "World", timeout_s: float, invitation: Invitation, board: Board | None = None):
        self._world = world
        self._journal = world.journal
        self._timeout_s = timeout_s
        self._tick_s = min(1.0, timeout_s / 8)
        self._place_every_s = max(2.0, world.size / 200)  # rank 0 reads at most 200 places a second
        self._invitation = invitation
        self._board = board
        self._host, self._process = socket.gethostname(), os.getpid()
        self._writer: asyncio.StreamWriter | None = None
        self._reply: asyncio.Future[dict[str, Any] | None] | None = None
        self._ending = False
        self._why_rank_0_left = ""
        self._failed = ("", 0)  # a collective that the backend gave up, how many had been started by then
        self._started = threading.Event()
        self._tried = threading.Event()  # to reach the board
        self._closed = threading.Event()
        self._fault: Exception | None = None  # for which it did not start
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()
        self._started.wait()
        if self._fault is not None:
            raise StartError(
                f"{world}: the watch over collectives does not start: {self._fault!r}. --comm-timeout 0 goes without it"
            ) from self._fault
        self._tried.wait(_FIRST_CONNECTION_S)
        atexit.register(self._python_ends)
        _open_watches.add(self)

    def close(self, why: str = "it closed its world") -> None:
        """Says good-bye: this rank is not missing. Its thread ends, but for rank 0's, which serves the board."""
        if self._closed.is_set() or os.getpid() != self._process:
            return
        self._closed.set()
        atexit.unregister(self._python_ends)
        _open_watches.discard(self)
        # Shorter than a person notices; what the board does not learn in that time it learns from the connection.
        said = asyncio.run_coroutine_threadsafe(self._leave(why), self._loop)
        if self._board is None:
            self._thread.join(5.0)
        else:
            with contextlib.suppress(TimeoutError):
                said.result(5.0)

    def why_failed(self, call: Call, what_the_backend_says: str) -> str:
        """What the main thread raises when the backend gave a collective up; asks the board, for seconds at most."""
        if self._ending:
            # The backend noticed that another rank has ended, as this one will at once: all has been said.
            time.sleep(5 * ANSWER_S)
        self._failed = call.name, self._journal.num_started
        _log.error(
            f"collective {call.name} failed, step {self._world.step}: {what_the_backend_says}; asking the other ranks"
        )
        seen = self.look(call)
        question = self._question(call, hangs=False)
        return failure_report(question, seen, what_the_backend_says, self._why_rank_0_left)

    def look(self, call: Call) -> list[Seen] | None:
        """Where all ranks are with respect to a collective; None where the board does not answer."""
        asked = asyncio.run_coroutine_threadsafe(self._ask(self._question(call, hangs=False)), self._loop)
        try:
            found = asked.result(2 * ANSWER_S)
        except TimeoutError:
            return None
        return found if isinstance(found, list) else None

    def _python_ends(self) -> None:
        error = getattr(sys, "last_value", None)
        why = _in_one_line(error) if error is not None else "its output says why"
        self.close(f"its Python ended without closing the world; {why}")

    # ---- in the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            if self._started.is_set():
                raise
            self._fault = error
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asking = asyncio.Lock()
        self._leaving = asyncio.Event()
        if self._board:
            await self._board.serve()
        tasks = [self._loop.create_task(part()) for part in (self._keep_connected, self._look_at_the_clock)]
        for task in tasks:
            task.add_done_callback(_say_if_it_failed)
        self._started.set()
        await self._leaving.wait()
        for task in tasks:
            task.cancel()
        if self._board:
            await asyncio.Event().wait()

    async def _leave(self, why: str) -> None:
        if self._board:
            self._board.say_that_rank_0_leaves(why)
        if self._writer is not None:
            send(self._writer, {"place": asdict(self._place())})
            send(self._writer, {"bye": why})
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._writer.drain(), 1.0)
        self._leaving.set()

    async def _keep_connected(self) -> None:
        failures = 0  # before the first connection
        while True:
            connection = await join(self._invitation, self._place(), _CONNECT_S)
            if connection is not None:
                failures = _GIVE_A_WARNING
                await self._listen(*connection)
            elif failures < _GIVE_A_WARNING:
                self._tried.set()
                failures += 1
                if failures == _GIVE_A_WARNING:
                    i = self._invitation
                    _log.warning(
                        f"cannot reach the status board of rank 0 at {' or '.join(i.addresses)}, port {i.port}: a "
                        "report of a hanging collective would not know where this rank is; "
                        "give --network-interface, or open the firewall"
                    )
            await asyncio.sleep(self._place_every_s)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._tried.set()
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        except OSError:
            pass  # as good as the end of the line
        finally:
            self._writer = None
            writer.close()
            if self._reply and not self._reply.done():
                self._reply.set_result(None)
        if self._ending:  # rank 0 has ended before its last word came through
            await asyncio.sleep(1.0)
            self._end("ends: a rank reported a collective that hangs, and rank 0 has ended")

    def _take(self, message: dict[str, Any]) -> None:
        if "question" in message:
            question = Question(**message["question"])
            send(self._writer, {"answer": message["answer"], "place": asdict(self._place(question))})
            if question.hangs:
                self._prepare_to_end(question)
        elif "end" in message:
            if message["end"] != self._world.rank:
                self._end(f"ends, as rank {message['end']} reported a collective that hangs")
        elif "rank_0_leaves" in message:
            self._why_rank_0_left = message["rank_0_leaves"]
        elif self._reply and not self._reply.done():
            self._reply.set_result(message)

    async def _look_at_the_clock(self) -> None:
        before = said = time.monotonic()
        while True:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            # A process that was stopped for an hour has not waited for an hour.
            passed, before = min(now - before, 2 * self._tick_s), now
            self._count_waiting(passed)
            call = self._journal.oldest_held_up()
            if call and call.waited_s >= self._timeout_s:
                await self._report(call)
            if now - said >= self._place_every_s and self._writer:
                said = now
                if self._writer.transport.get_write_buffer_size() < 1 << 16:  # else rank 0 does not read
                    send(self._writer, {"place": asdict(self._place())})

    def _count_waiting(self, passed_s: float) -> None:
        for call in list(self._journal.held_up):
            if call.done is not None and _is_done(call.done):
                self._journal.held_up.discard(call)
            elif call.waited_s < 0:  # seen for the first time: for how long, nobody knows
                call.waited_s = 0.0
            else:
                call.waited_s += passed_s

    async def _report(self, call: Call) -> None:
        question = self._question(call, hangs=True)
        found = await self._ask(question)
        if isinstance(found, int):
            self._prepare_to_end(question)
            await asyncio.Event().wait()  # for the board's word, or for the time set by that
        self._prepare_to_end(question)
        report = hang_report(question, found, self._why_rank_0_left)  # type: ignore[arg-type]
        say(self._world.rank, report, THREAD_NAME)
        if self._writer:
            send(self._writer, {"told": ""})
            await asyncio.sleep(0.5)  # the others read that they are to end
        os._exit(EXIT_STATUS)

    async def _ask(self, question: Question) -> list[Seen] | int | None:
        """Where all ranks are; or the rank that asked before this one; None: the board does not answer."""
        async with self._asking:
            if self._writer is None:
                return None
            self._reply = self._loop.create_future()
            send(self._writer, {"ask": asdict(question)})
            try:
                message = await asyncio.wait_for(self._reply, ANSWER_S + 2.0)
            except TimeoutError:
                return None
            if message is None:
                return None
            return message["asked_by"] if "asked_by" in message else seen_from(message["found"])

    def _question(self, call: Call, hangs: bool) -> Question:
        world = self._world
        ordered = world.backend == "torch"
        return Question(
            world.rank, call.name, call.nth, call.number, world.step, max(0.0, call.waited_s), hangs, ordered
        )

    def _place(self, question: Question | None = None) -> Place:
        journal = self._journal
        held_up = journal.oldest_held_up()
        place = Place(
            rank=self._world.rank,
            host=self._host,
            process=self._process,
            step=self._world.step,
            num_started=journal.num_started,
            last=journal.newest.name if journal.newest else "",
            waits_for=held_up.name if held_up else "",
            waited_s=max(0.0, held_up.waited_s) if held_up else 0.0,
            failed=self._failed[0] if self._failed[1] == journal.num_started else "",
        )
        if question is not None:
            newest = journal.newest_of.get(question.name)
            place.has_started = newest is not None and newest.nth >= question.nth
            place.waits_in_it = any((c.name, c.nth) == (question.name, question.nth) for c in list(journal.held_up))
            place.number = newest.number if newest and newest.nth == question.nth else 0
            place.code = code_of_main_thread()
        return place

    # ---- the end

    def _prepare_to_end(self, question: Question) -> None:
        if self._ending:
            return
        self._ending = True
        in_a_file = any(isinstance(handler, logging.FileHandler) for handler in _log.handlers)
        say(self._world.rank, stacks(THREAD_NAME), THREAD_NAME, on_stderr=not in_a_file)
        self._loop.call_later(
            4 * ANSWER_S,
            lambda: self._end(f"ends: collective {question.name} hangs, and nobody reported it in time"),
        )

    def _end(self, words: str) -> None:
        say(self._world.rank, words, THREAD_NAME)
        os._exit(EXIT_STATUS)


def report_failure(error: BaseException) -> None:
    """Tells the other ranks why this process is about to end: for programs that catch the error, print it and end by
    os._exit, so that Python's own end does not tell. Without a world that is watched: nothing."""
    for watch in list(_open_watches):
        watch.close(f"it failed; {_in_one_line(error)}")


def _in_one_line(error: BaseException) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())[:1000]


def _say_if_it_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error(
            "the watch over collectives has ended by a fault of its own; one that hangs is not reported any more",
            exc_info=task.exception(),
        )


def _is_done(done: Callable[[], bool]) -> bool:
    try:
        return done()
    except RuntimeError:  # of the device; the main thread meets it too, and raises it
        return True
