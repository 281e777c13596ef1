"""SIGTERM, SIGUSR1 and Ctrl-C in real launches: the step is finished, a checkpoint written, all processes leave; when
started again, the run goes on as if nothing had been."""

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.recipes.conftest import ROOT, SMALL, environment, losses, train_several
from tests.waiting import until

# name -> (the signal, who gets it, the status that the launch then ends with; horovodrun ends with 1 whatever its
# processes end with). "own launch" is of recipe mnist, run.sh of recipe face. (horovodrun and torchrun:
# tests/faults/signals/test_kill_matrix.py.)
LAUNCHES = {"run.sh": (signal.SIGTERM, "launcher", 75), "own launch": (signal.SIGUSR1, "rank", 75)}
# A constant rate: other courses depend on where a run ends.
FLAGS = "--lr-scheduler constant --batch-size 8 --val-targets --sample-rate 0.3 --dropout 0.2 --clip 5"
LONG = 100_000  # steps: it does not come to its end by itself


def command(name: str, root: Path, glyphs: Path, digits: Path) -> list[str]:
    if name == "own launch":
        words = ["mnist", "--gpus", "2", "--data-dir", str(digits), "--batch-size", "1", "--n-workers", "1"]
        return [sys.executable, "train.py", *words, "--epochs", str(LONG), "--models-root", str(root)]
    flags = [*SMALL, "--dataset", "glyphs", "--rec", str(glyphs), *shlex.split(FLAGS), "--max-steps", str(LONG)]
    flags += ["--models-root", str(root)]
    return ["bash", "run.sh", "--restarts", "3", *flags, "--checkpoint-every", "5"]


@pytest.fixture(scope="module")
def stopped(glyphs, digits, tmp_path_factory):
    """name -> (models_root, exit status, output)."""
    roots = {name: tmp_path_factory.mktemp("stopped") for name in LAUNCHES}
    with ThreadPoolExecutor(2) as pool:
        ended = {name: pool.submit(stop, name, root, glyphs, digits) for name, root in roots.items()}
    return {name: (roots[name], *future.result()) for name, future in ended.items()}


def stop(name: str, root: Path, glyphs: Path, digits: Path) -> tuple[int, str]:
    """A launch that gets its signal once it trains. That of run.sh loses a process first, and is started again."""
    number, whom, _ = LAUNCHES[name]
    signals: list[Signal] = [(number, whom, trains)]
    if name == "run.sh":
        signals = [(signal.SIGKILL, "rank", has_saved), (number, whom, goes_on)]
    return signalled(command(name, root, glyphs, digits), root, signals)


# (number, who gets it, when)
Signal = tuple[int, str, Callable[[Path], bool]]


def signalled(command: list[str], root: Path, signals: list[Signal]) -> tuple[int, str]:
    """(exit status, output) of a launch that gets signals, each once when(root)."""
    with (root / "output").open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(), "OMPI_MCA_mpi_yield_when_idle": "1", "RESTART_PAUSE_S": "0"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Of the tests themselves in a shell's background it would be ignored, and stay so.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        for number, whom, when in signals:
            until(partial(when, root), 250, process, (root / "output").read_text)
            target = process.pid if whom == "launcher" else a_rank_of(process.pid)
            psutil.Process(target).send_signal(number)
        status = process.wait(timeout=250)
    finally:
        kill_all(process)
    return status, (root / "output").read_text()


def trains(root: Path) -> bool:
    path = root / "loss.csv"
    return path.exists() and len(path.read_text().splitlines()) > 3


def has_saved(root: Path, after: int = 0) -> bool:
    return any(int(marker.parent.name[-8:]) > after for marker in root.glob("checkpoints/step-*/COMPLETE"))


def goes_on(root: Path) -> bool:
    """From a checkpoint, up to the next."""
    found = re.search(r"resumed from \S+/step-(\d+)", (root / "output").read_text())
    return found is not None and has_saved(root, int(found[1]))


def a_rank_of(pid: int) -> int:
    """The last process that trains, below this one; what such a process has started itself is none."""
    family = psutil.Process(pid).children(recursive=True)
    trainers = [p for p in family if any(word.endswith("train.py") for word in p.cmdline())]
    ranks = {p.pid: p for p in trainers if "RANK" in " ".join(p.environ())}
    return [pid for pid, p in ranks.items() if p.ppid() not in ranks][-1]


def kill_all(process: subprocess.Popen) -> None:
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_signal_ends_the_run_with_a_checkpoint(stopped, name):
    root, status, output = stopped[name]
    assert status == LAUNCHES[name][2], output
    (step,) = {int(found) for found in re.findall(r"stopped at step (\d+), as asked", output)}
    last = int((root / "loss.csv").read_text().splitlines()[-1].partition(",")[0])
    assert step == last
    assert (root / f"checkpoints/step-{step:08d}/COMPLETE").exists()
    assert not (root / "result.json").exists()
    assert "finishing this step, then a checkpoint" in output
    assert f"the same command resumes from {root}/checkpoints/step-{step:08d}" in output
    assert output.count("; restart ") == (name == "run.sh")
    assert not [p for p in psutil.process_iter() if str(root) in " ".join(_words(p))], "nothing is left"


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.long
def test_what_lost_a_process_and_was_stopped_ends_as_if_nothing_had_been(stopped, glyphs, tmp_path):
    """Bit by bit: started again by run.sh, and by hand. (tests/unit/train/test_run_restarts.py has the other ways of
    run.sh --restarts.)"""
    root, _, output = stopped["run.sh"]
    assert re.search(r"run.sh: status \d+; restart 1 of at most 3 in 0 s, from .*/step-\d+/COMPLETE", output)
    (step,) = map(int, re.findall(r"stopped at step (\d+), as asked", output))
    flags = f"--dataset glyphs --rec {glyphs} {FLAGS} --max-steps {step + 4}"
    train_several({root: flags, tmp_path: flags})
    assert losses(root) == losses(tmp_path)
    assert len(losses(root)) == step + 4
