"""A simulated horovodrun: Horovod's own elastic driver, in simulated threads; store, ssh and host file are ours.

What it starts are trainers on the simulated hosts. Their requests take the time that messages take, and its answers may
be late or those of before.
"""

from collections.abc import Callable
from typing import Any

from horovod.runner.elastic.driver import ElasticDriver

from partial_fc.comm.elastic import membership
from partial_fc.comm.elastic.store import ANSWER_S, ASK, REMIND_S
from tests.simulation.cluster import Cluster, Host, Name, Process
from tests.simulation.waiting import event

SSH_S = 7.0  # of silence, after which its ssh ends: docs/reliability.md's ServerAliveInterval
_KEEPALIVE_S = 30.0  # of a question that waits for others


class Store:
    """Of the driver: emptied when it makes a new world."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], bytes] = {}
        self.generation = 0
        self.is_open = True

    def init(self, plan: Any) -> None:
        self.kept.clear()
        self.generation += 1

    def stop(self) -> None:
        self.is_open = False


class Driver:
    """One horovodrun, from its start to its end."""

    def __init__(self, cluster: Cluster, train: Callable[[Process], int], min_np: int, max_np: int):
        self.cluster, self._train = cluster, train
        self.number = len(cluster.drivers)
        cluster.drivers.append(self)
        self.store = Store()
        self.process = Process(self.number, cluster.hosts[0], -1)
        self.is_gone = False
        self._limits = min_np, max_np
        self._before: dict[str, bytes] = {}
        self._elastic: ElasticDriver | None = None
        self.gone = event(cluster.clock)
        self._all = event(cluster.clock)

    def run(self) -> None:
        """As horovodrun does; its end is told by `gone`."""
        task = self.cluster.clock.start("horovodrun", self._run, self.process)
        while not task.done and not self.process.dead:
            self.gone.wait(5.0)
        self.is_gone, self.store.is_open = True, False

    def kill(self) -> None:
        """horovodrun ends, and what it has started hears of it."""
        if self.process.dead or self.is_gone:
            return
        self.cluster.trace("horovodrun: killed")
        self.process.dead, self.process.held = True, []
        self.is_gone, self.store.is_open = True, False
        for process in self._mine():
            if self.cluster.joined(process.host, self.process.host):
                delay = self.cluster.clock.random.random() * 5
                self.cluster.clock.call(delay, lambda process=process: self.cluster.kill(process))
        self.gone.set()

    def answers(self, process: Process) -> bool:
        return self.store.is_open and self.cluster.joined(process.host, self.process.host)

    def _mine(self) -> list[Process]:
        return [p for p in self.cluster.living() if self.cluster.driver_of(p) is self]

    def _run(self) -> None:
        try:
            least, most = self._limits
            discovery = type("Discovery", (), {"find_available_hosts_and_slots": lambda _: self._discover()})()
            self._elastic = ElasticDriver(self.store, discovery, least, most, timeout=120, cooldown_range=(3, 5))
            self._elastic.start(least, self._create_worker)
            self._elastic.get_results()
            self._elastic.stop()
        except Exception as error:  # horovodrun prints it and ends
            self.cluster.trace(f"horovodrun ends: {error!r}")
            self.store.is_open = False
        self._all.set()
        self.cluster.clock.sleep(1.0)
        self.is_gone = True
        self.gone.set()

    def _discover(self) -> dict[Name, int]:
        hosts = [host for host in self.cluster.hosts if host.is_listed]
        reached = [host for host in hosts if self.cluster.joined(host, self.process.host)]
        self.cluster.clock.sleep(0.02 if len(reached) == len(hosts) else 2.0)
        return {host.name: host.slots for host in reached}

    # ---- its processes

    def _create_worker(self, slot: Any, events: list[Any]) -> tuple[int, float]:
        cluster, clock = self.cluster, self.cluster.clock
        host = cluster.host(slot.hostname)
        clock.sleep(clock.random.uniform(0.05, 0.4))
        if not cluster.joined(host, self.process.host):
            clock.sleep(SSH_S)
            return 255, clock.now
        variables = {"HOROVOD_RANK": slot.rank, "HOROVOD_SIZE": slot.size, "HOROVOD_LOCAL_RANK": slot.local_rank,
                     "HOROVOD_LOCAL_SIZE": slot.local_size, "HOROVOD_CROSS_RANK": slot.cross_rank,
                     "HOROVOD_CROSS_SIZE": slot.cross_size, "HOROVOD_HOSTNAME": slot.hostname, "HOROVOD_ELASTIC": 1,
                     "HOROVOD_GLOO_RENDEZVOUS_ADDR": "driver", "HOROVOD_GLOO_RENDEZVOUS_PORT": self.number + 1000,
                     "DRIVER": self.number}  # fmt: skip
        environ = {name: str(value) for name, value in variables.items()}
        process = cluster.spawn(host, slot.local_rank, environ, lambda: self._train(process))
        silent_since = None
        while True:
            clock.sleep(0.25)
            is_joined = cluster.joined(host, self.process.host)
            silent_since = None if is_joined else silent_since or clock.now
            if silent_since and clock.now - silent_since > SSH_S:
                return 255, clock.now
            if process.dead and is_joined:
                return (255 if process.exit_code is None else process.exit_code), clock.now
            if any(event.is_set() for event in (*events, self._all)):
                self._terminate(process, host)
                return 143, clock.now

    def _terminate(self, process: Process, host: Host) -> None:
        """Its ssh is ended. What it has started on another host need not hear of that."""
        chance = self.cluster.clock.random
        if host is self.process.host or (self.cluster.joined(host, self.process.host) and chance.random() < 0.7):
            delay = chance.random() * 2
            self.cluster.clock.call(delay, lambda: self.cluster.kill(process))

    # ---- its store, as a trainer sees it

    def ask(self, method: str, path: str, body: bytes | None, remind: Callable[[float], None] | None):
        """`store.request`."""
        cluster, clock, me = self.cluster, self.cluster.clock, self.cluster.here
        clock.sleep(cluster.latency())
        self._reach(me)
        _, scope, key = path.split("/")
        if scope == ASK:
            answer: bytes | None = self._place_of(me, key, remind)
        elif method == "PUT":
            answer = self.store.kept[scope, key] = body or b""
        else:
            answer = self.store.kept.get((scope, key))
        clock.sleep(cluster.latency())
        self._reach(me)
        return (404, b"") if answer is None else (200, answer)

    def _reach(self, me: Process) -> None:
        clock = self.cluster.clock
        deadline = clock.now + ANSWER_S
        while not self.answers(me):
            if not self.store.is_open and self.cluster.joined(me.host, self.process.host):
                raise ConnectionRefusedError("Connection refused")
            if clock.now >= deadline:
                raise TimeoutError("timed out")
            clock.sleep(0.5)

    def _place_of(self, me: Process, key: str, remind: Callable[[float], None] | None) -> bytes:
        cluster, clock = self.cluster, self.cluster.clock
        name, _, slot = key.partition(":")
        host = cluster.host(name).name
        found: list[bytes] = []
        answered = event(clock)

        def handle() -> None:
            assert self._elastic is not None
            try:
                self._elastic.record_ready(host, int(slot))
                found.append(self._elastic.get_slot_info(host, int(slot)).to_response_string().encode())
            except RuntimeError as error:  # the connection is closed without an answer
                cluster.trace(f"no place for {key}: {error}")
            answered.set()

        if cluster.stale_answers and key in self._before and clock.random.random() < cluster.stale_answers:
            cluster.trace(f"a stale answer for {me}")
            return self._before[key]
        clock.start(f"place of {key}", handle, self.process)
        asked = reached = reminded = clock.now
        while not answered.wait(2.0):
            reached = clock.now if cluster.joined(me.host, self.process.host) else reached
            if self.is_gone:
                raise ConnectionResetError("Connection reset by peer")
            if clock.now - reached > _KEEPALIVE_S:
                raise TimeoutError("Connection timed out")
            if remind and clock.now - reminded > REMIND_S:
                reminded = clock.now
                remind(clock.now - asked)
        if not found:
            raise ConnectionResetError("Remote end closed connection without response")
        self._before[key] = found[0]
        return found[0]


class Notifier:
    """What the driver tells of hosts that come and go with: to the process that was there when it was made."""

    def __init__(self, address: Process, key: object, verbose: int, *, cluster: Cluster):
        self._process, self._cluster = address, cluster

    def notify_hosts_updated(self, timestamp: int, result: int) -> None:
        cluster, process = self._cluster, self._process
        clock = cluster.clock
        for _ in range(3):
            while process.stopped and not process.dead:
                clock.sleep(0.5)
            if not process.dead and cluster.joined(process.host, cluster.hosts[0]):
                break
            clock.sleep(0.0 if process.dead and process.host.is_up else 2.0)
        else:
            raise ConnectionRefusedError(f"{process} does not answer")

        def told() -> None:
            if membership._member is not None:
                cluster.trace("told of hosts that come or go")
                membership._member.on_hosts_updated(timestamp, result)

        clock.call(cluster.latency(), told, process)
        if clock.random.random() < 0.15:  # once more, late
            clock.call(clock.random.random() * 6, told, process)


class NotificationManager:
    """Horovod's, of a trainer."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster

    def init(self, address: str, port: int) -> None:
        cluster, me = self._cluster, self._cluster.here
        driver = cluster.driver_of(me)
        cluster.clock.sleep(cluster.latency())
        driver._reach(me)
        assert driver._elastic is not None
        driver._elastic.register_worker_server(me.host.name, me.slot, me, None)

    def register_listener(self, listener: object) -> None:
        pass
