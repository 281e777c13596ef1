"""This process as a worker of horovodrun's elastic driver: leaving a world, joining the next one, resuming.

The driver starts the processes, sees them end, and looks for hosts once a second. When a rank is lost, the collectives
of all others fail (CollectiveError); when hosts change, rank 0 is notified. Every process then shuts its world down and
asks the driver for its new rank. The driver answers when all processes of the old world have asked or ended, and has by
then started those of new hosts.

This module adds three things to Horovod 0.28. The new ranks wait for each other before hvd.init (Barrier): an
hvd.init that waits in vain ends the process (an uncaught exception in its thread). So a silent peer counts as lost
after SILENT_S, however long the start may take. Horovod asks a local store, which returns the rank already assigned and
forwards all else: two requests to the driver would count a process twice. _CRASHES, variables that crash a second
hvd.init, are unset.
"""

import gc
import http.client
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from partial_fc.comm.elastic.store import ASK, Store, request
from partial_fc.comm.launch import restart_agent
from partial_fc.comm.launch.detect import Launch, StartError
from partial_fc.comm.world import CollectiveError, World

_SCOPE = "barrier"
_GONE, _READY = b" gone", b" ready"  # after a name
_RANK_0 = "all"  # the key of rank 0's answer:
_ARE_YOU_READY, _ENTER, _RETRY = b"ready?", b"here", b"again"
_POLL_S = 0.1
_LONGER_S = 2.0  # the others wait longer than rank 0, which names the missing ranks


@dataclass(frozen=True)
class Barrier:
    """One process at the barrier before the ranks of an elastic run enter a new world: all of them enter, or none.

    It has two rounds. New processes take time to start, and an old one may be lost meanwhile, so rank 0 waits until all
    have arrived, and then until all confirm that they are alive. They exchange keys in the store of the driver, emptied
    for each world."""

    driver: tuple[str, int]  # address and port of its store
    name: bytes  # of this process, unique
    rank: int
    size: int
    hosts_changed: threading.Event  # set when hosts are added or removed; Horovod notifies rank 0

    def wait(self, arrive_s: float, silent_s: float) -> str:
        """Returns why no rank enters; "" if all do. All must arrive within arrive_s seconds, and confirm within
        silent_s."""
        self._put(self.rank, self.name)
        if self.rank == 0:
            problem = self._lead(arrive_s, silent_s)
            self._put(_RANK_0, _RETRY if problem else _ENTER)
        else:
            problem = self._follow(arrive_s, silent_s)
        if problem and not self.is_replaced():
            self._put(self.rank, self.name + _GONE)
        return problem

    def is_replaced(self) -> bool:
        """Returns whether the driver has replaced this process: it is not in the store of this world."""
        return not self._get(self.rank).startswith(self.name)

    def _lead(self, arrive_s: float, silent_s: float) -> str:
        problem = self._wait_for_all(b"", arrive_s, f"not joined within {arrive_s:.0f} s (--start-timeout)")
        if problem:
            return problem
        self._put(0, self.name + _READY)
        self._put(_RANK_0, _ARE_YOU_READY)
        return self._wait_for_all(_READY, silent_s, f"joined, but then been silent for {silent_s:.0f} s")

    def _wait_for_all(self, last_word: bytes, timeout_s: float, what_else: str) -> str:
        deadline = time.monotonic() + timeout_s
        # If it is set, the driver has probably made this world because of that change.
        changed_before = self.hosts_changed.is_set()
        while True:
            word_W = [self._get(rank) for rank in range(self.size)]
            missing = [
                str(rank)
                for rank, word in enumerate(word_W)
                if not word or word.endswith(_GONE) or not word.endswith(last_word)
            ]
            if not missing:
                return ""
            if self.hosts_changed.is_set() and not changed_before:
                return "hosts were added or removed"
            if time.monotonic() > deadline:
                return f"of {self.size} processes rank {', '.join(missing)} has {what_else}"
            time.sleep(_POLL_S)

    def _follow(self, arrive_s: float, silent_s: float) -> str:
        deadline = time.monotonic() + arrive_s + _LONGER_S
        is_ready = False
        while time.monotonic() < deadline:
            word = self._get(_RANK_0)
            if word and self.is_replaced():
                return "rank 0 has answered in another world"
            if word == _ENTER:
                return ""
            if word == _RETRY:
                return "rank 0 has cancelled the start"
            if word == _ARE_YOU_READY and not is_ready:
                self._put(self.rank, self.name + _READY)
                is_ready, deadline = True, time.monotonic() + silent_s + _LONGER_S
            time.sleep(_POLL_S)
        return "rank 0 has not answered that all are here"

    def _get(self, key: int | str) -> bytes:
        return request(self.driver, "GET", f"/{_SCOPE}/{key}")[1]

    def _put(self, key: int | str, word: bytes) -> None:
        request(self.driver, "PUT", f"/{_SCOPE}/{key}", word)


SILENT_S = 8  # a peer that sends nothing for so long is lost
# Consecutive losses of a rank without a new step between them.
MAX_LOSSES_WITHOUT_PROGRESS = 5
_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_RANK_VARIABLES = [f"HOROVOD_{scope}{name}" for scope in ("", "LOCAL_", "CROSS_") for name in ("RANK", "SIZE")]
_ASK_AGAIN_S = 1.0
_CRASHES = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")
_log = logging.getLogger("partial_fc")
T = TypeVar("T")


class HostsChanged(RuntimeError):
    """Hosts were added or removed. All ranks raise it after the same step."""


class Evicted(RuntimeError):
    """This process is no longer part of the job."""


def active() -> bool:
    """Returns whether elastic horovodrun started this process."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def mismatched_ranks(value_W: Sequence[object], trained_W: Sequence[bool]) -> list[int]:
    """Returns the ranks whose value differs from that of the first rank that trained in an earlier world; none if no
    rank did. They must end, and the others continue without them."""
    expected = next((value for value, trained in zip(value_W, trained_W, strict=True) if trained), None)
    return [rank for rank, value in enumerate(value_W) if any(trained_W) and value != expected]


@dataclass
class Recovery:
    """One change of the world, as seen by this process; times by time.monotonic."""

    why: str
    noticed: float
    rejoined: float = 0.0


@dataclass(eq=False)
class Member:
    """This process as a worker of the driver; there is one, `member()`."""

    host: str
    local_rank: int
    assignment: tuple[int, ...]  # the values of _RANK_VARIABLES
    store: Store  # forwards what it does not know to the driver's store
    name: bytes = field(default_factory=lambda: secrets.token_hex(8).encode())  # at the barrier
    has_assignment: bool = True  # not used yet: the first one comes with the environment
    is_restart: bool = False  # replaces a worker that had joined a world, and has not asked yet
    world: World | None = None
    recovery: Recovery | None = None  # until the state is restored
    last_step: float = field(default_factory=lambda: time.monotonic())  # when that was complete
    losses_without_progress: int = 0
    furthest_step: int = 0
    hosts_changed: threading.Event = field(default_factory=threading.Event)

    @property
    def launch(self) -> Launch:
        rank, size, local_rank, local_size = self.assignment[:4]
        return Launch("horovod", rank, size, local_rank, local_size, "horovodrun (elastic)")

    def on_hosts_updated(self, timestamp: int, result: int) -> None:
        """Handles a change of hosts; Horovod's notification service calls this on rank 0."""
        self.hosts_changed.set()

    def step_done(self, step: int) -> None:
        """Counts a step. Steps repeated after a loss are no progress: the same one may fail each time."""
        self.last_step = time.monotonic()
        if step > self.furthest_step:
            self.furthest_step, self.losses_without_progress = step, 0

    def recovery_summary(self) -> str:
        """Ends a recovery, once the state of the last commit is restored. Returns a message for the user: the cause,
        and the time of each phase; "" at the first start."""
        recovery, self.recovery = self.recovery, None
        if recovery is None:
            return ""
        now, last = time.monotonic(), self.last_step
        return (
            f"{recovery.why}; recovered in {now - last:.1f} s: detect {recovery.noticed - last:.1f}, "
            f"rejoin {recovery.rejoined - recovery.noticed:.1f}, restore {now - recovery.rejoined:.1f}"
        )

    def rendezvous(self, start_timeout_s: float) -> None:
        """Waits until all ranks of the new world are ready to enter it, so that hvd.init returns at once.

        Raises Evicted if the driver has no rank for this process, StartError if the driver is gone.
        """
        try:
            self._rendezvous(start_timeout_s)
        except (OSError, http.client.HTTPException) as error:
            address, port = self.store.driver
            raise StartError(
                f"horovodrun at {address}, port {port}, does not answer ({error}): it has ended, or its host "
                "cannot be reached from here. The others continue if they reach it; otherwise start the job again: it "
                "resumes from its newest checkpoint"
            ) from error
        self._hand_over(joined=True)
        self.store.assignment = ",".join(map(str, self.assignment)).encode()
        for name, value in zip(_RANK_VARIABLES, self.assignment, strict=True):
            os.environ[name] = str(value)
        if self.recovery:
            self.recovery.rejoined = time.monotonic()

    def _rendezvous(self, start_timeout_s: float) -> None:
        while True:
            if not self.has_assignment:
                # The driver empties its store for a new world, and waits for all processes of the old one. If this
                # process's name is missing, the driver considers it dead (its host was unreachable) and starts, or has
                # started, a replacement: asking would mix the two up.
                before = self._barrier
                if before.is_replaced() and not self.is_restart:
                    raise Evicted(
                        f"{self.host}, process {self.local_rank}: the others have continued without this process, "
                        "which could not be reached"
                    )
                self.hosts_changed.clear()  # its answer includes all changes so far
                answer = self._ask_driver()
                if answer[0] >= 0 and not before.is_replaced():
                    # It has made no new world. A driver that is about to end answers so; trusting it would find the
                    # previous world's answer of rank 0, and enter hvd.init alone, which ends that process.
                    _log.warning("horovodrun has answered with the rank of the world before; asking again")
                    time.sleep(_ASK_AGAIN_S)
                    continue
                self.assignment, self.is_restart = answer, False
            self._hand_over(joined=False)
            self.has_assignment = False
            if self.assignment[0] < 0:
                raise Evicted(f"{self.host}, process {self.local_rank}: not part of the job any more")
            problem = self._barrier.wait(start_timeout_s, SILENT_S)
            if not problem:
                return
            _log.warning(f"{problem}; asking horovodrun who is left")

    def shutdown(self, why: str) -> None:
        """Shuts down a world that has failed or is about to change."""
        self.recovery = self.recovery or Recovery(why, time.monotonic())
        world, self.world = self.world, None
        if world is not None:
            world.close()
        else:  # it failed while it was made
            import horovod.torch as hvd

            hvd.shutdown()

    def _ask_driver(self) -> tuple[int, ...]:
        """Returns the new values of _RANK_VARIABLES. The driver answers once all others have asked or ended."""

        def remind(waited_s: float) -> None:
            _log.warning(
                f"horovodrun has given no new rank for {waited_s:.0f} s: it waits until each process of the old "
                "world has asked, or has ended. One that is stopped (ps shows T) must be continued or killed; one "
                "on a host that is gone has ended when its ssh has (ServerAliveInterval in ~/.ssh/config), and "
                "fewer than --min-np processes wait for more hosts until --elastic-timeout"
            )

        path = f"/{ASK}/{self.host}:{self.local_rank}"
        _, answer = request(self.store.driver, "GET", path, remind=remind)
        return tuple(int(number) for number in answer.split(b","))

    def _hand_over(self, joined: bool) -> None:
        """Saves the state for the next worker, if this process is killed. joined: the ranks have joined."""
        restart_agent.hand_over(json.dumps([self.name.decode(), self.assignment, joined]).encode())

    def take_place(self, handover: bytes) -> None:
        """Takes over from a worker that has ended, unknown to Horovod's driver. If the ranks had joined, it asks the
        driver for a rank, as the others do; if not, they wait for it at the barrier."""
        name, assignment, joined = json.loads(handover)
        self.assignment, self.has_assignment, self.is_restart = tuple(assignment), not joined, joined
        if joined:  # the name registered in this world's store
            self.name = name.encode()

    @property
    def _barrier(self) -> Barrier:
        rank, size = self.assignment[:2]
        return Barrier(self.store.driver, self.name, rank, size, self.hosts_changed)


_member: Member | None = None


def member() -> Member:
    """Returns the only Member of this process, created at the first call; requires `active`."""
    global _member
    if _member is None:
        e = os.environ
        missing = [name for name in (_ADDRESS, _PORT, "HOROVOD_HOSTNAME", *_RANK_VARIABLES) if not e.get(name)]
        if missing:
            raise StartError(f"HOROVOD_ELASTIC=1, but {', '.join(missing)} not set: start through horovodrun")
        assignment = tuple(int(e[name]) for name in _RANK_VARIABLES)
        driver = e[_ADDRESS], int(e[_PORT])
        _member = Member(e["HOROVOD_HOSTNAME"], assignment[2], assignment, Store(driver))
        if handover := restart_agent.handover():
            _member.take_place(handover)
        e[_ADDRESS], e[_PORT] = "127.0.0.1", str(_member.store.server_port)
        left_out = [f"{name}={e.pop(name)}" for name in _CRASHES if name in e]
        if left_out and assignment[0] == 0:
            _log.warning(
                f"{' and '.join(left_out)} left out: with them Horovod 0.28 crashes when ranks rejoin; without, it "
                "is 128 MB and 1 ms"
            )
        e.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(SILENT_S))
        from horovod.common.elastic import notification_manager

        # From now on the driver notifies this process of added and removed hosts, while it is rank 0.
        notification_manager.init(*driver)
        notification_manager.register_listener(_member)
    return _member


def run(train: Callable[[], T]) -> T | None:
    """Calls train(), and in an elastic run again in each new world: it joins (comm.init), restores the state and
    resumes.

    Without horovodrun's elastic mode train() is called once. Returns what it returns, None if this process is no longer
    part of the job. Raises what train raises, except for the loss of a rank.
    """
    if not active():
        return train()
    from horovod.common.exceptions import HorovodInternalError

    while True:
        try:
            return train()
        except Evicted as error:
            _log.warning(f"{error}; this process ends, the others continue")
            return None
        except HostsChanged as error:
            why = str(error)
            if member().assignment[0] == 0:
                _log.warning(why)
        except (CollectiveError, HorovodInternalError) as error:
            why = f"a rank was lost ({str(error).partition(': ')[0]})"
            _log.warning(f"{error}\nleaving, to rejoin the remaining ranks")
            member().losses_without_progress += 1
            if member().losses_without_progress > MAX_LOSSES_WITHOUT_PROGRESS:
                raise
        member().shutdown(why)
        gc.collect()  # free the old world's tensors before new ones are allocated
