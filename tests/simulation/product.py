"""Puts the simulation under the product: clocks, sleeps, threads, sockets, disks and Horovod of the modules that have
them, for as long as a simulation runs. Nothing else of the product is replaced, but for what only shows a run's course
(progress, pictures) and the arithmetic of a step."""

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Iterable, Iterator, MutableMapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import horovod
import horovod.common.elastic
import torch
from horovod.runner.common.util import timeout as horovod_timeout
from horovod.runner.elastic import discovery, registration
from horovod.runner.elastic import driver as elastic_driver
from safetensors import torch as safetensors

import partial_fc.comm.horovod
import partial_fc.files
from partial_fc.checkpoint import files as checkpoint_files
from partial_fc.checkpoint import folders, lock, read, recovery, rows, saver
from partial_fc.checkpoint.peer import commits, restore, transfer
from partial_fc.comm import device
from partial_fc.comm.elastic import membership
from partial_fc.train import end, loop, resume, run
from partial_fc.train.begin import run_folder
from partial_fc.train.guards import commits as commits_of_loop
from partial_fc.train.record import curve
from tests.simulation import waiting
from tests.simulation.cluster import Cluster
from tests.simulation.collectives import Horovod
from tests.simulation.disk import Path, Raw, os_of, rmtree
from tests.simulation.driver import NotificationManager, Notifier
from tests.simulation.job import Recipe, write_results

Replacement = tuple[Any, str, Any]
_MANY_BYTES = 1 << 50
_log = logging.getLogger("partial_fc")


class Environment(MutableMapping[str, str]):
    """`os.environ` of the process that runs."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster

    def _here(self) -> dict[str, str]:
        here = self._cluster.here
        return here.environ if here is not None else {}

    def __getitem__(self, name: str) -> str:
        return self._here()[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._here()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._here()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._here())

    def __len__(self) -> int:
        return len(self._here())


class StoreHere:
    """In place of `elastic.store.Store`: this host's stand-in for the driver's store."""

    server_port = 1

    def __init__(self, driver: tuple[str, int]):
        self.driver, self.assignment = driver, b""


class Silent:
    """Takes whatever is asked of it."""

    samples_per_s = 0.0

    def __init__(self, *_given: object):
        pass

    def due(self, step: int, position: int) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return lambda *_given, **_more: None


class Asked:
    """In place of the handlers of signals: whether this process was asked to stop."""

    def __init__(self, cluster: Cluster, *_given: object):
        self._process = cluster.here

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    @property
    def status(self) -> int:
        return self._process.asked


class Told(logging.Handler):
    """The product's own words, in the trace."""

    def __init__(self, cluster: Cluster):
        super().__init__()
        self._cluster = cluster

    def emit(self, record: logging.LogRecord) -> None:
        self._cluster.trace(f"  {record.levelname[0]} {record.getMessage()}")


def switch(before: Any, following: Any) -> None:
    """What is one of a process, and not of this one, where all of them are."""
    if before is not None:
        before.member = membership._member
    membership._member = following.member if following is not None else None


def _refuse_bound_clocks(simulated: set[Any]) -> None:
    """A default of a dataclass that is the clock itself was bound at import, and would go on showing real time."""
    for module in simulated:
        for kind in filter(dataclasses.is_dataclass, vars(module).values()):
            for value in dataclasses.fields(kind):
                assert value.default_factory not in (time.monotonic, time.perf_counter, time.time), (kind, value.name)


def replacements(cluster: Cluster, recipe: Recipe) -> list[Replacement]:
    clock = cluster.clock
    as_threading, as_time = waiting.modules(clock)
    chance = clock.random
    as_secrets = SimpleNamespace(
        token_hex=lambda n: f"{chance.getrandbits(8 * n):0{2 * n}x}",
        randbits=chance.getrandbits,
        randbelow=chance.randrange,
    )
    environ = Environment(cluster)
    as_os = os_of(cluster.disk, lambda: cluster.here.number, partial(_kill, cluster), environ)
    as_socket = SimpleNamespace(gethostname=lambda: str(cluster.here.host.name))
    hvd = Horovod(cluster)
    executor = partial(waiting.Executor, clock)
    observed = partial(_recover, cluster, resume.recover)

    def request(driver: tuple[str, int], method: str, path: str, body: bytes | None = None, remind: Any = None) -> Any:
        return cluster.drivers[driver[1] - 1000].ask(method, path, body, remind)

    def meet(launch: Any) -> tuple[Any, torch.device]:
        of = membership.member().launch
        world = partial_fc.comm.horovod.HorovodWorld(of, "cpu", 0.0, launch.start_timeout)
        return world, torch.device("cpu")

    def load_tensors(path: Path) -> dict[str, torch.Tensor]:
        return safetensors.load(path.read_bytes())

    made: list[Replacement] = [
        (module, "time", as_time)
        for module in (membership, saver, lock, commits, commits_of_loop, loop, elastic_driver, discovery,
                       horovod_timeout)
    ]  # fmt: skip
    made += [(module, "threading", as_threading) for module in (lock, elastic_driver, registration, discovery)]
    made += [(module, "logging", _as_logging(cluster)) for module in (elastic_driver, registration, discovery)]
    made += [(module, "secrets", as_secrets) for module in (membership, saver, lock, run_folder)]
    made += [(module, "socket", as_socket) for module in (lock, commits_of_loop)]
    made += [(module, "threads", lambda count, name: executor(count, thread_name_prefix=name)) for module in (saver,)]
    made += [(module, "available_memory_bytes", lambda: _MANY_BYTES) for module in (saver, commits)]
    made += [(module, "load_tensors", load_tensors) for module in (read, rows)]
    made += [(module, "request", request) for module in (membership,)]
    made += [
        (module, "os", as_os)
        for module in (membership, partial_fc.comm.horovod, partial_fc.files, folders, read, lock, saver, curve)
    ]
    made += [
        (module, "read_bytes", lambda path, most_bytes: path.read_bytes())
        for module in (partial_fc.files, checkpoint_files)
    ]
    _refuse_bound_clocks({module for module, name, _ in made if name == "time"})
    # Some pieces a commit, and some messages a recovery.
    made += [(module, "PIECE_BYTES", 64) for module in (commits, restore, transfer)]
    made += [
        (commits, "_SMALL_BYTES", 40),
        (membership, "gc", SimpleNamespace(collect=lambda: None)),
        (membership, "Store", StoreHere),
        (membership, "_member", None),
        (horovod.common.elastic, "notification_manager", NotificationManager(cluster)),
        (horovod, "torch", hvd),
        (partial_fc.comm.horovod, "hvd", hvd),
        (discovery, "random", random.Random(chance.getrandbits(32))),
        (elastic_driver, "WorkerNotificationClient", partial(Notifier, cluster=cluster)),
        (folders, "shutil", SimpleNamespace(rmtree=rmtree)),
        (lock, "_start_of", lambda number: _start_of(cluster, number)),
        (lock, "open", lambda path, mode, opener: path.open(mode)),
        (folders, "open", lambda path, mode, opener: path.open(mode)),
        (recovery, "time", as_time),
        (lock, "_machine", lambda: str(cluster.here.host.name)),
        (commits, "identity", lambda: cluster.here.host.name.encode().hex().ljust(15, "0")),
        (curve, "FileIO", Raw),
        (resume, "recover", observed),
        (read, "sha256", partial(_compared, cluster, read.sha256)),
        (checkpoint_files, "open", lambda path, mode, opener: path.open(mode)),
        # Of Python 3.11: one for all processes.
        (rows.StoredRows.__dict__["columns"], "lock", contextlib.nullcontext()),
        (commits.PeerCopies, "_complete", _completing(cluster, commits.PeerCopies._complete)),
        (commits_of_loop.Commits, "leave", _leaving(cluster, commits_of_loop.Commits.leave)),
        (run, "meet", meet),
        (run, "open_files", lambda *_: _log),
        (run, "header", Silent()),
        (end, "_write_results", write_results),
        # Nothing draws random numbers here; to seed torch and to look for versions is half of the time.
        (loop, "torch", SimpleNamespace(manual_seed=lambda seed: None)),
        (device, "metadata", SimpleNamespace(version=lambda name: "0", PackageNotFoundError=KeyError)),
        (loop, "StopSignals", partial(Asked, cluster)),
        (loop, "Progress", Silent),
        (curve.Curve, "redraw", lambda *_, **_more: None),
        (loop, "first_batch", Silent()),
        (loop, "update", recipe.update),
    ]
    return made


def _as_logging(cluster: Cluster) -> SimpleNamespace:
    def told(text: object, *given: object) -> None:
        cluster.trace(f"  {str(text) % given if given else text}")

    return SimpleNamespace(debug=lambda *_: None, info=told, warning=told, error=told, exception=told)


def _recover(cluster: Cluster, recover: Any, memory: Any, world: Any, root: Path) -> Any:
    cluster.oracle.recovering(memory)
    return recover(memory, world, root)


def _compared(cluster: Cluster, sha256: Any, path: Path) -> str:
    cluster.oracle.compares(str(path))
    return sha256(path)


def _completing(cluster: Cluster, complete: Any) -> Any:
    def observed(copies: Any, commit: Any) -> None:
        complete(copies, commit)
        cluster.oracle.whole(commit)

    return observed


def _leaving(cluster: Cluster, leave: Any) -> Any:
    def observed(commits_here: Any, step: int) -> None:
        try:
            leave(commits_here, step)
        except membership.HostsChanged:
            cluster.oracle.left(step, commits_here.are_kept)
            raise

    return observed


def _kill(cluster: Cluster, number: int, signal: int) -> None:
    if cluster.processes[number].dead:
        raise ProcessLookupError


def _start_of(cluster: Cluster, number: int) -> int | None:
    process = cluster.processes[number]
    return None if process.dead or process.host is not cluster.here.host else number


@contextlib.contextmanager
def replaced(made: Iterable[Replacement]) -> Iterator[None]:
    """(where, name, value): that name means that value."""
    before = []
    try:
        for where, name, value in made:
            before.append((where, name, getattr(where, name, open)))  # `open` is in no module of ours
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in reversed(before):
            setattr(where, name, value)


@contextlib.contextmanager
def simulated(cluster: Cluster, recipe: Recipe, more: Iterable[Replacement] = ()) -> Iterator[None]:
    """The product, on simulated hosts. more: what else is replaced, before that."""
    level, propagates, handlers = _log.level, _log.propagate, _log.handlers[:]
    with replaced(more), replaced(replacements(cluster, recipe)):
        try:
            _log.handlers[:] = [Told(cluster)]
            _log.setLevel(logging.INFO)
            _log.propagate = False
            yield
        finally:
            _log.handlers[:] = handlers
            _log.setLevel(level)
            _log.propagate = propagates
