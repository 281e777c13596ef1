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
