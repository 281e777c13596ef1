"""Simulated time: of many threads one runs at a time, and a seed decides which.

A thread gives way only where it waits (`park`) or reaches a `point`. What happens next is the earliest event of a heap,
equal times in an order that the seed gives. A process that is killed is never resumed; one that is stopped is, when it
goes on. When a simulation ends all threads are unwound by `Over`.
"""

import heapq
import random
import threading
from collections.abc import Callable
from typing import Any


class Over(BaseException):
    """The simulation has ended: raised in every thread that still waits."""


class Stuck(Exception):
    """Nothing is left to happen, or simulated time is up."""


class Task:
    """A thread of the simulation; process: whose it is, None: of nobody who can die."""

    def __init__(self, name: str, process: Any = None):
        self.name, self.process = name, process
        self.baton = threading.Lock()
        self.baton.acquire()
        # A wake-up is meant for one wait: that of this number.
        self.ticket = 0
        self.woken = self.done = False
        self.joining: list[Task] = []


class Clock:
    """The heap of events, and whose turn it is."""

    def __init__(self, seed: int, limit_s: float, switch: Callable[[Any], None] = lambda process: None):
        """switch: called with the process of whatever runs next, where it changes."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.num_events = 0
        self._limit_s, self._switch = limit_s, switch
        self._heap: list[tuple[float, float, int, Any, Any, Any, bool]] = []
        self._main = self.task = Task("main")
        self.process: Any = None
        self._tasks: list[tuple[Task, threading.Thread]] = []
        self.failure: BaseException | None = None
        self._is_over = False

    # ---- what waits

    def park(self, until: float | None = None) -> bool:
        """Waits until `wake`, or until that time; returns whether it was woken."""
        if self._is_over:
            raise Over
        me = self.task
        me.ticket += 1
        me.woken = False
        if until is not None:
            self._push(until, None, me, me.ticket, False)
        self._give_way(me)
        return me.woken

    def wake(self, task: Task) -> None:
        """The wait that the task is in ends now."""
        self._push(self.now, None, task, task.ticket, True)

    def sleep(self, seconds: float) -> None:
        self.park(self.now + max(0.0, seconds))

    def point(self, chance: float = 0.3, most_s: float = 0.004) -> None:
        """Others may run here."""
        if self._is_over:
            raise Over
        if self.random.random() < chance:
            self.sleep(self.random.random() * most_s)

    def call(self, delay_s: float, act: Callable[[], object], process: Any = None) -> None:
        """act() then, in the process, if that lives and runs (when it goes on, if it is stopped). It must not wait."""
        self._push(self.now + delay_s, act, process, 0, False)

    def start(self, name: str, act: Callable[[], object], process: Any = None) -> Task:
        """A new thread."""
        task = Task(name, process)

        def body() -> None:
            task.baton.acquire()
            try:
                if not self._is_over:
                    act()
            except Over:
                pass
            except BaseException as error:
                self.failure = self.failure or error
            task.done = True
            if self._is_over:
                return
            for other in task.joining:
                self.wake(other)
            task.joining = []
            following = self._main if self.failure else self._next()
            self._hand(following)

        thread = threading.Thread(target=body, name=f"simulated {name}", daemon=True)
        self._tasks.append((task, thread))
        thread.start()
        self._push(self.now, None, task, task.ticket, True)
        return task

    def join(self, task: Task, until: float | None = None) -> bool:
        """Whether it has ended by then."""
        while not task.done and (until is None or self.now < until):
            me = self.task
            task.joining.append(me)
            try:
                self.park(until)
            finally:
                if me in task.joining:
                    task.joining.remove(me)
        return task.done

    # ---- processes

    def resume(self, process: Any) -> None:
        """A stopped process goes on: what came for it meanwhile comes now."""
        held, process.held = process.held, []
        for event in held:
            _, order, number, act, target, ticket, woken = event
            heapq.heappush(self._heap, (self.now, order, number, act, target, ticket, woken))

    # ---- the whole

    def run(self, act: Callable[[], object]) -> None:
        """Runs act() in the main thread, where it may wait; raises what failed in any other. Ends all threads."""
        try:
            act()
            if self.failure:
                raise self.failure
        except Over:
            raise self.failure or AssertionError("the simulation has ended too early") from self.failure
        finally:
            self._is_over = True
            for task, thread in self._tasks:
                if thread.is_alive():
                    self.task, task.ticket = task, task.ticket + 1
                    task.baton.release()
                    thread.join(10)
            self._enter(None)

    # ---- inside

    def _push(self, when: float, act: Any, target: Any, ticket: int, woken: bool) -> None:
        self.num_events += 1
        heapq.heappush(self._heap, (when, self.random.random(), self.num_events, act, target, ticket, woken))

    def _next(self) -> Task:
        """Lets happen what happens, until a thread is to go on. Whatever fails goes to the main thread."""
        while self._heap:
            event = heapq.heappop(self._heap)
            when, _, _, act, target, ticket, woken = event
            process = target if act else target.process
            if not act and (target.done or target.ticket != ticket):
                continue
            if process is not None and process.dead:
                continue
            if process is not None and process.stopped:
                process.held.append(event)
                continue
            if when > self._limit_s:
                self.failure = Stuck(f"nothing is done after {self._limit_s:.0f} simulated seconds")
                return self._main
            self.now = max(self.now, when)
            self._enter(process)
            if not act:
                target.woken = woken
                return target
            try:
                act()
            except BaseException as error:
                self.failure = error
                return self._main
        self.failure = Stuck("nothing is left to happen")
        return self._main

    def _enter(self, process: Any) -> None:
        if process is not self.process:
            self._switch(process)
            self.process = process

    def _hand(self, task: Task) -> None:
        self.task = task
        self._enter(task.process)
        task.baton.release()

    def _give_way(self, me: Task) -> None:
        following = self._next()
        if following is not me:
            self._hand(following)
            me.baton.acquire()
        if self._is_over:
            raise Over
        if self.failure and me is self._main:
            raise Over
