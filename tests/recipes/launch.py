"""How tests run recipes without waiting for torch to be imported: in their own process, or in several forked ones.

    here("recipes.face.main", words)                          one process: this one
    several([Given("recipes.face.main", words), ...], 2)      several, run after run in one launch

A recipe is named by its module, so that a new one needs nothing here.
"""

import importlib
import logging
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import torch

from tests.recipes.several import Given, become_rank
from tests.recipes.several import main as run_given
from tests.waiting import free_port

_TIMEOUT_S = 240.0
_GRACE_S = 20.0  # from the first process that fails to the end of the others: they say what they know
# What a process that was forked has already. (It is forked from a server that computes nothing: what has gone backward
# once may not be forked.)
_PRELOADED = [
    "recipes.face.main",
    "recipes.mnist.main",
    "recipes.imagenet.main",
    "recipes.kinetics.main",
    "tests.recipes.several",
    "torch.utils.tensorboard",
    # What the recipes import only when they are called.
    "partial_fc.data.check.at_start",
    "partial_fc.embedding.load",
    "partial_fc.evaluate.roc",
    "partial_fc.evaluate.verification",
    "recipes.face.log_style",
    "partial_fc.train.run",
    "recipes.face.backbone",
    "partial_fc.flags.head",
    "recipes.imagenet.epochs",
    "recipes.kinetics.epochs",
    "recipes.mnist.epochs",
    "tyro",
    "typeguard",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tests.recipes.first_time",
]


def here(recipe: str, words: Sequence[str]) -> int:
    """Runs it in this process; returns the exit status."""
    torch.set_num_threads(1)
    logger = logging.getLogger("partial_fc")
    try:
        return importlib.import_module(recipe).main(list(words))
    finally:
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
        logger.propagate = True


def start(target: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """Calls a module's function in a forked process."""
    process = _context().Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def killed(given: Given, num_ranks: int, marker: Path, output: Path) -> None:
    """Starts it in forked processes and kills the last rank (SIGKILL) when a file is there. The others must fail."""
    port = free_port()
    started = [start(become_rank, rank, num_ranks, port, str(output), run_given, [given]) for rank in range(num_ranks)]
    try:
        give_up = time.monotonic() + _TIMEOUT_S
        while not marker.exists():
            assert all(process.is_alive() for process in started), output.read_text()[-6000:]
            assert time.monotonic() < give_up, output.read_text()[-6000:]
            time.sleep(0.01)
        started[-1].kill()
        for process in started:
            process.join(_TIMEOUT_S)
        statuses = [process.exitcode for process in started]
        assert statuses.pop() == -signal.SIGKILL
        assert None not in statuses, "the others wait for ever"
    finally:
        for process in started:
            process.kill()


def several(runs: Sequence[Given], num_ranks: int = 2) -> str:
    """Runs them one after the other in num_ranks processes over torch.distributed. Returns what these printed; fails
    where a process does."""
    return ranks(num_ranks, run_given, runs)


def ranks(num_ranks: int, program: Callable[..., object], *arguments: object, status: int = 0) -> str:
    """Calls a module's function in forked processes, as torchrun would start them. Returns what these printed; fails
    where a process ends with another status."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        port = free_port()
        started = [
            start(become_rank, rank, num_ranks, port, str(output), program, *arguments) for rank in range(num_ranks)
        ]
        give_up = time.monotonic() + _TIMEOUT_S
        while running := [process.sentinel for process in started if process.exitcode is None]:
            wait(running, max(0.0, give_up - time.monotonic()))
            if any(process.exitcode for process in started):
                give_up = min(give_up, time.monotonic() + _GRACE_S)
            if time.monotonic() >= give_up:
                break
        for process in started:
            process.kill()
            process.join()
        printed = output.read_text() if output.exists() else ""
    assert [process.exitcode for process in started] == [status] * num_ranks, printed[-6000:]
    return printed


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def endings(printed: str, rank: int) -> list[str]:
    """How the runs of a launch ended in one of its ranks: exit statuses, or errors."""
    start = f"rank {rank} ended with: "
    return [line.removeprefix(start) for line in printed.splitlines() if line.startswith(start)]
