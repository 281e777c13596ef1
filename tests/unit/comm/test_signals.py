"""SIGTERM and SIGUSR1 are noted while training, and only then. At the start of a run signals end it, with their own
status, and nothing is left."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from partial_fc import output
from partial_fc.comm import CollectiveError
from partial_fc.train.guards.signals import SIGNALS, TOGETHER_S, StopSignals


@pytest.fixture
def seen():
    """What reaches the handlers that were there before."""
    numbers: list[int] = []
    before = {n: signal.signal(n, lambda n, _: numbers.append(n)) for n in SIGNALS}
    yield numbers
    for n, handler in before.items():
        signal.signal(n, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_handlers_come_back(number, seen, capfd):
    own = [signal.getsignal(n) for n in SIGNALS]
    with StopSignals(rank=3) as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number
    assert [signal.getsignal(n) for n in SIGNALS] == own
    assert seen == []
    os.kill(os.getpid(), number)
    assert seen == [number]
    output.drain()
    assert f"rank 3: {number.name}: finishing this step" in capfd.readouterr().err


def test_what_comes_with_the_first_signal_is_no_second_one(seen):
    """... but what comes later is: it then means what it meant before."""
    now = 100.0
    with StopSignals(clock=lambda: now) as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        now += 0.9 * TOGETHER_S
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == []
        now += 0.2 * TOGETHER_S
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        assert signals.received == signal.SIGUSR1


def test_a_second_signal_ends_the_process_with_it():
    program = """
import os, sys
from partial_fc.train.guards.signals import SIGNALS, StopSignals
for number in SIGNALS:
    child = os.fork()
    if not child:
        now = 0.0
        with StopSignals(clock=lambda: now):
            os.kill(os.getpid(), number)
            now = 10.0
            os.kill(os.getpid(), number)
            print("still there", flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(-number) for number in SIGNALS]
    assert done.stderr.count("ending at once") == len(SIGNALS)


@pytest.mark.parametrize("all_listen", [False, True])
def test_a_rank_ends_by_the_signal_that_has_ended_another(seen, all_listen):
    """... which did not listen yet."""
    with contextlib.suppress(CollectiveError), StopSignals() as signals:
        signals.all_listen = all_listen
        os.kill(os.getpid(), signal.SIGTERM)
        raise CollectiveError("rank 1 is gone")
    assert seen == ([] if all_listen else [signal.SIGTERM])


def test_in_another_thread_nothing_is_changed():
    found = []

    def there() -> None:
        before = [signal.getsignal(n) for n in SIGNALS]
        with StopSignals() as signals:
            found.append([signal.getsignal(n) for n in SIGNALS] == before and signals.received is None)

    thread = threading.Thread(target=there)
    thread.start()
    thread.join()
    assert found == [True]


# ---- at the start

ROOT = Path(__file__).parents[3]
# As torch's C code imports numpy.
LOSES_INTERRUPTS = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    pass
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
        done = subprocess.run(words, env=env, text=True, timeout=120, **pipes)
        return done.returncode, done.stdout

    return train


def test_ctrl_c_ends_an_import_that_would_lose_it(train):
    recipe = "import loses_interrupts\ndef main(flags):\n    print('trains')"
    assert train(recipe, loses_interrupts=LOSES_INTERRUPTS) == (-signal.SIGINT, "")


def test_ctrl_c_is_an_exception_once_all_is_imported(train):
    status, printed = train("def main(flags):\n    import signal\n    signal.raise_signal(signal.SIGINT)")
    assert (status, "recipe.py: interrupted" in printed) == (130, True), printed
