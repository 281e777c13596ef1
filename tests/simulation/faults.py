"""What befalls a simulated cluster, drawn from a seed."""

import errno
import random
from contextlib import suppress
from dataclasses import dataclass, replace

from partial_fc.checkpoint.folders import MARKER
from tests.simulation.cluster import Cluster, Host
from tests.simulation.driver import Notifier


@dataclass(frozen=True)
class Fault:
    """kind: a function below; at_s: when; lasts_s: how long it is until all is as before. world: at_s counts from when
    that one has met, with `trains` from when it trains; 0: from the start. number: which process, host or file, of
    those that there are then."""

    kind: str
    at_s: float
    lasts_s: float
    number: int
    world: int = 0
    trains: bool = False


# By how often they are drawn.
_KINDS = {"kill": 8, "crash": 4, "stop": 4, "cut": 4, "unlist": 3, "disk": 2, "full": 1, "driver": 1, "ask": 1}
_KINDS |= {"rumour": 2, "damage": 3}


def draw(chance: random.Random, step_s: float) -> list[Fault]:
    """step_s: how long a step takes, or a little more."""
    kinds, length_s = list(_KINDS), 25 * step_s
    faults = []
    for _ in range(chance.choice((0, 1, 2, 3, 4, 6, 8))):
        kind = chance.choices(kinds, [_KINDS[kind] for kind in kinds])[0]
        lasts_s = chance.choice((0.3, 2.0, 6.0, 9.0, 20.0, 45.0)) * chance.uniform(0.5, 1.5)
        faults.append(
            Fault(kind, round(chance.uniform(0.5, 8.0 + length_s), 3), round(lasts_s, 3), chance.randrange(1000))
        )
    # Often one soon after another.
    for i, fault in enumerate(faults[1:]):
        if chance.random() < 0.4:
            at_s = round(faults[i].at_s + chance.choice((0.02, 0.3, 2.0, 9.0)) * chance.random(), 3)
            faults[i + 1] = replace(fault, at_s=at_s)
    # Or while a world begins.
    for i, fault in enumerate(faults):
        if chance.random() < 0.7:
            at_s = round(chance.choice((0.1, 1.0, 0.5 * length_s, length_s)) * chance.random(), 3)
            world, trains = chance.choice((1, 1, 1, 2, 2, 2, 3, 4)), chance.random() < 0.75
            faults[i] = replace(fault, at_s=at_s, world=world, trains=trains)
    if chance.random() < 0.3:
        faults += _in_first_steps(chance, step_s)
    return sorted(faults, key=lambda fault: (fault.world, fault.at_s))


def _in_first_steps(chance: random.Random, step_s: float) -> list[Fault]:
    """World after world, while its first commit is under way or has just become whole: a rank or host is lost, or one
    that has just come."""
    made = []
    for world in range(chance.choice((1, 2)), chance.choice((3, 4, 6))):
        kind = chance.choice(("newest", "newest", "newest", "kill", "crash", "cut"))
        at_s = chance.choice((1.5, 3.0, 8.0)) * step_s * chance.random()
        lasts_s = chance.choice((0.3, 2.0, 9.0)) * chance.uniform(0.5, 1.5)
        made.append(Fault(kind, round(at_s, 3), round(lasts_s, 3), chance.randrange(1000), world, trains=True))
    return made


def befall(cluster: Cluster, fault: Fault) -> None:
    """It will happen then."""

    def now() -> None:
        cluster.oracle.disturbed()
        globals()[f"_{fault.kind}"](cluster, fault)

    if fault.world:
        when = cluster.oracle.afterwards.setdefault((fault.world, fault.trains), [])
        when.append(lambda: cluster.clock.call(fault.at_s, now))
    else:
        cluster.clock.call(fault.at_s, now)


def _kill(cluster: Cluster, fault: Fault) -> None:
    if living := cluster.living():
        cluster.kill(living[fault.number % len(living)])


def _newest(cluster: Cluster, fault: Fault) -> None:
    """Of those in a world, who was started last; where one is alone, in the next world."""
    there = [process for process in cluster.living() if process.comm]
    if len(there) > 1:
        cluster.kill(there[-1])
    else:
        befall(cluster, replace(fault, world=cluster.oracle.num_worlds + 1))


def _stop(cluster: Cluster, fault: Fault) -> None:
    if living := cluster.living():
        cluster.stop(living[fault.number % len(living)], fault.lasts_s)


def _ask(cluster: Cluster, fault: Fault) -> None:
    """SIGUSR1: all are to stop, with a checkpoint."""
    if living := cluster.living():
        process = living[fault.number % len(living)]
        cluster.trace(f"{process}: is asked to stop")
        process.asked = 75


def _other_host(cluster: Cluster, fault: Fault) -> Host:
    """Any but horovodrun's own."""
    return cluster.hosts[1 + fault.number % (len(cluster.hosts) - 1)]


def _crash(cluster: Cluster, fault: Fault) -> None:
    cluster.crash(_other_host(cluster, fault), fault.lasts_s)


def _cut(cluster: Cluster, fault: Fault) -> None:
    cluster.cut(_other_host(cluster, fault), fault.lasts_s)


def _unlist(cluster: Cluster, fault: Fault) -> None:
    """Taken out of the host file, and put in again; or only put in."""
    host = _other_host(cluster, fault)
    cluster.trace(f"host {host.name}: {'out of' if host.is_listed else 'not in'} the host file")
    host.is_listed = False

    def back() -> None:
        cluster.trace(f"host {host.name}: in the host file")
        host.is_listed = True

    cluster.clock.call(fault.lasts_s, back)


def _rumour(cluster: Cluster, fault: Fault) -> None:
    """A process is told of hosts that come or go, and none do."""
    if living := cluster.living():
        told = Notifier(living[fault.number % len(living)], None, 0, cluster=cluster)
        cluster.clock.start("rumour", lambda: _tell(told))


def _tell(told: Notifier) -> None:
    with suppress(OSError):
        told.notify_hosts_updated(0, 0)


def _driver(cluster: Cluster, fault: Fault) -> None:
    cluster.drivers[-1].kill()


def _disk(cluster: Cluster, fault: Fault, number: int = errno.EIO) -> None:
    cluster.trace(f"the disk fails for {fault.lasts_s:.1f} s: {errno.errorcode[number]}")
    cluster.disk.failing, cluster.oracle.disk_was_bad = number, True

    def back() -> None:
        cluster.trace("the disk is in order")
        cluster.disk.failing = 0

    cluster.clock.call(fault.lasts_s, back)


def _full(cluster: Cluster, fault: Fault) -> None:
    _disk(cluster, fault, errno.ENOSPC)


def _damage(cluster: Cluster, fault: Fault) -> None:
    """A file of the newest checkpoint, as soon as there is one, is changed (while nobody relies on it), cut short, or
    removed; often all begins anew then, as it is seen when it is read."""
    step = cluster.oracle.newest_on_disk()
    files = cluster.disk.files
    folder = next((name for name in files if name.endswith(f"step-{step:08d}/{MARKER}")), "").rpartition("/")[0]
    inside = sorted(name for name in files if folder and name.startswith(f"{folder}/"))
    inside = [name for name in inside if not name.endswith((MARKER, ".sha256"))]
    how, name = fault.number % 3, inside[fault.number % len(inside)] if inside else ""
    if not name or (how == 0 and cluster.oracle.is_relied_on(name)):
        if cluster.oracle.finished is None:
            cluster.clock.call(0.5, lambda: _damage(cluster, fault))
        return
    cluster.oracle.damaged[folder] = files[f"{folder}/{MARKER}"]
    data, chance = files[name].data, cluster.clock.random
    cluster.trace(f"damage: {name}, {len(data)} bytes, {('a bit', 'cut short', 'removed')[how]}")
    if how == 2:
        del files[name]
    elif how == 1:
        del data[chance.randrange(len(data)) :]
    else:
        # A safetensors file's numbers are its end.
        data[chance.randrange(chance.choice((0, max(0, len(data) - 8))), len(data))] ^= 1 << chance.randrange(8)
    if fault.number % 4:
        cluster.clock.call(chance.random(), lambda: _driver(cluster, fault))
