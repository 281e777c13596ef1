"""Simulated hosts and the processes on them, what they reach of each other, and what happens to them."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import Clock
from tests.simulation.disk import Disk, Path

if TYPE_CHECKING:
    from tests.simulation.collectives import Communicator
    from tests.simulation.driver import Driver
    from tests.simulation.oracle import Oracle

KILLED = 137


class Name(str):
    """A host's name, whose hash is that of every Python: horovodrun orders its hosts by the order of a set."""

    def __hash__(self) -> int:
        return zlib.crc32(self.encode())

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


@dataclass(eq=False)
class Host:
    name: Name
    slots: int
    is_listed: bool = True  # in the host file
    is_up: bool = True
    is_cut: bool = False  # off from all other hosts
    starts_s: tuple[float, float] = (0.5, 3.0)  # what a process needs before it meets others


@dataclass(eq=False)
class Process:
    """A trainer, or a horovodrun (slot -1)."""

    number: int
    host: Host
    slot: int
    environ: dict[str, str] = field(default_factory=dict)
    dead: bool = False
    stopped: bool = False
    held: list[Any] = field(default_factory=list)  # what happens when it goes on
    exit_code: int | None = None
    asked: int = 0  # the status to end with, once it was asked to stop
    member: Any = None  # membership's own, of this process
    memory: Any = None  # what it keeps from world to world
    comm: "Communicator | None" = None

    def __str__(self) -> str:
        return f"{self.host.name}{self.slot}#{self.number}" if self.slot >= 0 else f"horovodrun#{self.number}"


class Cluster:
    """All of it. The first host is horovodrun's own."""

    def __init__(
        self, clock: Clock, hosts: list[Host], *, slow_s: float, disk_waits: bool, tell: Callable[[str], None]
    ):
        """slow_s: how long a message takes now and then."""
        self.clock, self.hosts, self._slow_s, self._tell = clock, hosts, slow_s, tell
        self.processes: list[Process] = []
        self.drivers: list[Driver] = []
        self.stale_answers = 0.0  # how many of the driver's answers are those of before
        self.disk = Path.disk = Disk(clock, self._reaches_disk, disk_waits)
        self.oracle: Oracle

    @property
    def here(self) -> Process:
        return self.clock.process

    def trace(self, text: str) -> None:
        self._tell(f"{self.clock.now:8.3f} {self.clock.process or '-'!s:<12} {text}")

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if str(host.name) == str(name))

    def latency(self) -> float:
        """Of a message."""
        chance = self.clock.random
        if self._slow_s and chance.random() < 0.05:
            return chance.random() * self._slow_s
        return 0.0005 + chance.random() * 0.01

    # ---- who reaches whom

    def joined(self, one: Host, other: Host) -> bool:
        """Whether messages go from host to host."""
        return one.is_up and other.is_up and (one is other or not (one.is_cut or other.is_cut))

    def talk(self, one: Process, other: Process) -> bool:
        """Whether both run and reach each other."""
        run = not (one.dead or other.dead or one.stopped or other.stopped)
        return run and self.joined(one.host, other.host)

    def _reaches_disk(self) -> bool:
        process = self.clock.process
        return process is None or self.joined(process.host, self.hosts[0])

    def driver_of(self, process: Process) -> "Driver":
        return self.drivers[int(process.environ["DRIVER"])]

    # ---- processes

    def spawn(self, host: Host, slot: int, environ: dict[str, str], act: Callable[[], int]) -> Process:
        """Starts a trainer: act() returns its exit status."""
        process = Process(len(self.processes), host, slot, dict(environ))
        self.processes.append(process)

        def body() -> None:
            self.clock.sleep(self.clock.random.uniform(*host.starts_s))
            self.end(process, act(), "has ended")

        self.clock.start(str(process), body, process)
        return process

    def end(self, process: Process, code: int, why: str) -> None:
        """Never runs again. Whatever it has done so far stays done."""
        if process.dead:
            return
        self.trace(f"{process}: {why}, status {code}")
        self.oracle.disturbed()
        process.dead, process.exit_code, process.held = True, code, []
        if process.comm:
            process.comm.lose(process.comm.members.index(process), is_gone=True)
        if process is self.clock.process:
            self.clock.park()

    def living(self, host: Host | None = None) -> list[Process]:
        return [p for p in self.processes if not p.dead and p.slot >= 0 and host in (None, p.host)]

    # ---- what happens to them

    def kill(self, process: Process) -> None:
        self.end(process, KILLED, "killed")

    def stop(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        if process.dead or process.stopped:
            return
        self.trace(f"{process}: stopped for {seconds:.1f} s")
        process.stopped = True
        self._silent([process])
        self.clock.call(seconds, lambda: self._go_on(process))

    def _go_on(self, process: Process) -> None:
        if process.stopped and not process.dead:
            process.stopped = False
            self.trace(f"{process}: goes on")
            self.oracle.disturbed()
            self.clock.resume(process)
            self._retry()

    def cut(self, host: Host, seconds: float) -> None:
        """Its cable is out for so long."""
        if host.is_cut or not host.is_up:
            return
        self.trace(f"host {host.name}: cut off for {seconds:.1f} s")
        host.is_cut = True
        self._silent(self.living(host))
        self.clock.call(seconds, lambda: self._join_again(host))

    def _join_again(self, host: Host) -> None:
        self.trace(f"host {host.name}: can be reached again")
        self.oracle.disturbed()
        host.is_cut = False
        self._retry()

    def crash(self, host: Host, seconds: float) -> None:
        """Power off, and on after so long."""
        if not host.is_up:
            return
        self.trace(f"host {host.name}: down for {seconds:.1f} s")
        host.is_up = False
        for process in self.living(host):
            process.dead, process.exit_code, process.held = True, None, []
            if process.comm:
                process.comm.lose(process.comm.members.index(process), is_gone=False)

        def back() -> None:
            self.trace(f"host {host.name}: up again")
            host.is_up = True

        self.clock.call(seconds, back)

    def _silent(self, processes: list[Process]) -> None:
        for comm in {p.comm for p in processes if p.comm}:
            for process in processes:
                if process in comm.members:
                    comm.lose(comm.members.index(process), is_gone=False)
            # A host that is cut off loses the others just so.
            for rank, other in enumerate(comm.members):
                if other not in processes:
                    comm.lose(rank, is_gone=False)

    def _retry(self) -> None:
        for number in sorted({p.comm.number for p in self.processes if p.comm and not p.dead}):
            next(p.comm for p in self.processes if p.comm and p.comm.number == number).retry()
