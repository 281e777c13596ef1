"""Signals at the start of a run end it, with the status of the signal, and nothing is left."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# As torch's C code imports numpy.
LOSES_INTERRUPTS = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    pass
"""
# A recipe of no more than a start, on two shards or two GPUs.
STARTS = """
import signal
import tyro
from dataclasses import dataclass
from partial_fc.comm.launch import start, stores
from partial_fc.flags import Flags, LaunchFlags, RendezvousFlags

@dataclass(frozen=True)
class Job:
    launch: Flags[LaunchFlags] = LaunchFlags()
    rendezvous: Flags[RendezvousFlags] = RendezvousFlags()

def main(arguments):
    job = tyro.cli(Job, args=arguments)
    status = start.start(job.launch, job.rendezvous)
    if status is None:
        print("trains")
    return status or 0
"""
ENDED_ONCE_ANNOUNCED = """
announce = stores.FileStore.announce
def announce_and_end(store, text):
    announced = announce(store, text)
    signal.raise_signal(signal.SIGTERM)
    return announced
stores.FileStore.announce = announce_and_end
"""


@pytest.fixture
def train(tmp_path):
    """Trains a recipe, beside other modules, and returns (status, printed)."""

    def train(recipe: str, *flags: str, **modules: str) -> tuple[int, str]:
        for name, text in {"recipe": recipe, **modules}.items():
            (tmp_path / f"{name}.py").write_text(text)
        words = [sys.executable, "-m", "partial_fc", "train", str(tmp_path / "recipe.py"), *flags]
        env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job does not
        done = subprocess.run(words, env=env, text=True, preexec_fn=listens, timeout=120, **pipes)
        return done.returncode, done.stdout

    return train


def test_ctrl_c_ends_an_import_that_would_lose_it(train):
    recipe = "import loses_interrupts\ndef main(flags):\n    print('trains')"
    assert train(recipe, loses_interrupts=LOSES_INTERRUPTS) == (-signal.SIGINT, "")


def test_ctrl_c_is_an_exception_once_all_is_imported(train):
    status, printed = train("def main(flags):\n    import signal\n    signal.raise_signal(signal.SIGINT)")
    assert (status, "recipe.py: interrupted" in printed) == (130, True), printed


def test_a_shard_that_is_ended_once_it_is_announced_leaves_nothing(train, tmp_path):
    meet = tmp_path / "meet"
    meet.mkdir()
    flags = ["--num-shards", "2", "--shard-id", "0", "--run-id", "ended", "--file-store-path", str(meet)]
    status, printed = train(STARTS + ENDED_ONCE_ANNOUNCED, *flags)
    assert status == 128 + signal.SIGTERM, printed
    assert os.listdir(meet) == []
