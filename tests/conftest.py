"""Settings of every test."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Before torch is imported, which reads it then. Several processes share the cores, also where one file is run by hand.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests' servers are on this machine, whatever proxy it uses.
os.environ["no_proxy"] = "127.0.0.1,localhost"

# No deadline: nothing is said about time by tests whose cores are shared. Derandomised: a failure repeats.
settings.register_profile("partial_fc", deadline=None, derandomize=True)
settings.load_profile("partial_fc")

# `nohup make test`, or a shell's background job, ignores signals, and what a test starts would ignore them, too: there
# they are to mean what they mean in a terminal.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


# Of the files that start processes those that take longest. They come first, then files with slow tests: of processes
# that share the files none is left alone with a dear one at the end. (With --no-loadscope-reorder of xdist.)
_DEAR = (
    "recipes/face/test_combinations.py",
    "faults/disk/test_enumeration.py",
    "cluster/test_hosts_come_and_go.py",
    "cluster/test_two_hosts.py",
    "cluster/test_sockets.py",
    "recipes/face/test_several_heads.py",
    "recipes/face/test_tuning.py",
    "recipes/face/test_study.py",
    "recipes/face/test_face.py",
    "recipes/imagenet/test_imagenet.py",
    "recipes/face/test_guards.py",
    "recipes/mxnet/test_mnist_kvstore.py",
    "unit/verbs/test_export.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(_DEAR)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def order(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.relative_to(Path(__file__).parent).as_posix()
        return place.get(name, len(place)), item.path not in slow

    items.sort(key=order)


@pytest.fixture(scope="session")
def mx() -> Any:
    """MXNet, where it is installed. After torch, whose libraries it would otherwise replace, and in no file's head: it
    stays for every later test of the process."""
    return pytest.importorskip("recipes.mxnet.library").mx


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """pytest's, with what the package logs: once a run has opened its files, that goes nowhere else."""
    monkeypatch.setattr(logging.getLogger("partial_fc"), "propagate", True)
    return caplog


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """partial-fc lets a closed pipe end its process, and keeps its files to their owner. Where a test calls it, a later
    test's socket and files must not know."""
    before, umask = signal.getsignal(signal.SIGPIPE), os.umask(0o022)
    os.umask(umask)
    yield
    signal.signal(signal.SIGPIPE, before)
    os.umask(umask)
