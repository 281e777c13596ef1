"""What stands for the modules `threading`, `time` and `concurrent.futures` in simulated code."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Self

from tests.simulation.clock import Clock, Task


class Lock:
    def __init__(self, clock: Clock):
        self._clock = clock
        self._held = False
        self._waiting: deque[Task] = deque()

    def acquire(self) -> bool:
        while self._held:
            self._waiting.append(self._clock.task)
            self._clock.park()
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        while self._waiting:
            self._clock.wake(self._waiting.popleft())

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()


class Condition(Lock):
    def __init__(self, clock: Clock):
        super().__init__(clock)
        self._sleeping: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        me = self._clock.task
        self._sleeping.append(me)
        self.release()
        try:
            return self._clock.park(None if timeout is None else self._clock.now + timeout)
        finally:
            if me in self._sleeping:
                self._sleeping.remove(me)
            self.acquire()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else self._clock.now + timeout
        while not predicate() and (until is None or self._clock.now < until):
            self.wait(None if until is None else until - self._clock.now)
        return predicate()

    def notify_all(self) -> None:
        sleeping, self._sleeping = self._sleeping, []
        for task in sleeping:
            self._clock.wake(task)


def event(clock: Clock) -> threading.Event:
    """Python's own, which waits in simulated time. (So do `future` and `barrier`.)"""
    made = threading.Event()
    made._cond = Condition(clock)  # type: ignore[attr-defined]
    return made


def future(clock: Clock) -> Future[Any]:
    made: Future[Any] = Future()
    made._condition = Condition(clock)  # type: ignore[assignment]
    return made


class Executor:
    """One thread for all that is handed in, in order."""

    def __init__(self, clock: Clock, max_workers: int, thread_name_prefix: str):
        self._clock = clock
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._task: Task | None = None

    def submit(self, act: Callable[..., Any], *arguments: Any) -> Future:
        handed_in = future(self._clock)
        self._queue.append((handed_in, lambda: act(*arguments)))
        if self._task is None or self._task.done:
            self._task = self._clock.start("pool", self._work, self._clock.process)
        return handed_in

    def _work(self) -> None:
        while self._queue:
            handed_in, act = self._queue.popleft()
            self._clock.point()
            try:
                result = act()
            except Exception as error:
                handed_in.set_exception(error)
            else:
                handed_in.set_result(result)

    def shutdown(self) -> None:
        if self._task is not None:
            self._clock.join(self._task)


class Thread:
    def __init__(
        self, clock: Clock, target: Callable[..., object], args: tuple = (), name: str = "", daemon: bool = True
    ):
        self._clock, self._target, self._arguments, self.name, self.daemon = clock, target, args, name, daemon
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._clock.start(
            self.name or self._target.__qualname__, lambda: self._target(*self._arguments), self._clock.process
        )

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        self._clock.join(self._task, None if timeout is None else self._clock.now + timeout)


def barrier(clock: Clock, parties: int, action: Callable[[], None] | None = None) -> threading.Barrier:
    made = threading.Barrier(parties, action)
    made._cond = Condition(clock)
    return made


def modules(clock: Clock) -> tuple[SimpleNamespace, SimpleNamespace]:
    """`threading` and `time`."""

    def bound(kind: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **more: kind(clock, *given, **more)

    as_threading = SimpleNamespace(
        Lock=bound(Lock),
        Condition=lambda lock=None: Condition(clock),
        Event=bound(event),
        Thread=bound(Thread),
        Barrier=bound(barrier),
        BrokenBarrierError=threading.BrokenBarrierError,
    )
    as_time = SimpleNamespace(
        monotonic=lambda: clock.now,
        perf_counter=lambda: clock.now,
        time=lambda: 1.7e9 + clock.now,
        sleep=clock.sleep,
        strftime=lambda form: f"second {clock.now:.0f}",
    )
    return as_threading, as_time
