"""What stands for the modules `threading`, `time` and `concurrent.futures` in simulated code."""

import threading
from collections import deque
from collections.abc import Callable
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


class Event:
    def __init__(self, clock: Clock):
        self._clock = clock
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._clock.wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else self._clock.now + timeout
        while not self._is_set and (until is None or self._clock.now < until):
            me = self._clock.task
            self._waiting.append(me)
            try:
                self._clock.park(until)
            finally:
                if me in self._waiting:
                    self._waiting.remove(me)
        return self._is_set


class Future:
    """Of an Executor."""

    def __init__(self, clock: Clock):
        self._ended = Event(clock)
        self._result: Any = None
        self._error: BaseException | None = None

    def finish(self, act: Callable[[], Any]) -> None:
        try:
            self._result = act()
        except Exception as error:
            self._error = error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        self._ended.wait()
        return self._error

    def result(self) -> Any:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Executor:
    """One thread for all that is handed in, in order."""

    def __init__(self, clock: Clock, max_workers: int, thread_name_prefix: str):
        self._clock = clock
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._task: Task | None = None

    def submit(self, act: Callable[..., Any], *arguments: Any) -> Future:
        future = Future(self._clock)
        self._queue.append((future, lambda: act(*arguments)))
        if self._task is None or self._task.done:
            self._task = self._clock.start("pool", self._work, self._clock.process)
        return future

    def _work(self) -> None:
        while self._queue:
            future, act = self._queue.popleft()
            self._clock.point()
            future.finish(act)

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
    """Python's own, which waits in simulated time."""
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
        Event=bound(Event),
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
