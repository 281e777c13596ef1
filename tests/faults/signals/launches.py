"""The launchers as users type them, each with a small job, and which of their processes is what."""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from tests.running import ROOT, environment, steps_done
from tests.waiting import until

JOB = shlex.split(
    "--dataset synthetic --num-classes 200 --num-images 256 --image-size 24 --batch-size 4 --backbone tiny "
    "--embedding-size 16 --optimizer sgd --lr 0.003 --lr-scaling none --lr-scheduler constant --warmup-epochs 0 "
    "--num-workers 1 --precision fp32 --frequent 10 --verbose 0 --keep-checkpoints 2 --comm-timeout 60 "
    "--start-timeout 60"
)
EVERY = 20  # steps between checkpoints
_RECIPE = "tests/faults/signals/kill_job.py"
_TRAIN = [sys.executable, "train.py", _RECIPE]
_TAG = "FAULT_TAG"
_PR_SET_PDEATHSIG = 1  # prctl(2)
PATIENCE_S = 600.0  # until a job trains, on a machine that has much else to do


@dataclass(frozen=True)
class Launch:
    """words: before the job's flags. above: the processes between the command and rank 1, the command's own first."""

    words: list[str]
    above: tuple[str, ...] = ("launcher",)


_GLOO = ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"]
_LAUNCH = [sys.executable, *shlex.split("-m partial_fc launch --launcher local -n 2 -s 0")]
_RESTARTS = ["--restarts", "99"]
LAUNCHES = {
    "own launch": Launch([*_TRAIN, "--gpus", "2"]),
    "own launch, --restarts": Launch([*_TRAIN, "--gpus", "2", *_RESTARTS]),
    "horovodrun --gloo": Launch([*_GLOO, *_TRAIN], ("launcher", "helper")),
    "horovodrun --mpi": Launch(
        ["horovodrun", "--mpi", "-np", "2", "-H", "localhost:2", *_TRAIN], ("launcher", "helper")
    ),
    "run.sh": Launch(["bash", "run.sh"], ("supervisor", "launcher")),
    "run.sh --restarts": Launch(["bash", "run.sh", *_RESTARTS], ("supervisor", "launcher")),
    "partial-fc launch": Launch([*_LAUNCH, *_TRAIN]),
    "torchrun": Launch(["torchrun", "--standalone", "--nproc_per_node=2", "--no-python", *_TRAIN]),
}


class Started:
    """A command that trains, with all processes that have come of it, and what it prints. folder: for what this says of
    itself, what kill_job.py does, and the run."""

    def __init__(self, name: str, folder: Path, flags: list[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.root, self.launch = folder, folder / "run", LAUNCHES[name]
        self.tag = uuid.uuid4().hex
        self._output = folder / f"output-{self.tag}"
        for path in folder.glob("rank-*"):
            path.unlink()
        host_file = folder / "hosts"
        host_file.write_text("localhost slots=2\n")
        env: Mapping[str, str] = {
            **environment(),
            "FAULT_FOLDER": str(folder),
            _TAG: self.tag,
            "RECIPE": _RECIPE,
            "DATASET": "synthetic",
            "HOST_FILE": str(host_file),
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "RESTART_PAUSE_S": "1",
        }
        self.process = subprocess.Popen(
            [*self.launch.words, *JOB, "--models-root", str(self.root), *flags],
            cwd=ROOT,
            env=env,
            start_new_session=True,
            preexec_fn=_begin,
            stdin=subprocess.DEVNULL,
            stdout=self._output.open("wb"),
            stderr=subprocess.STDOUT,
        )

    @property
    def printed(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_until_it_trains(self, num_steps: int = 3) -> None:
        """Some steps, of both ranks, since this was started. AssertionError: it does not come so far."""
        wait = partial(until, seconds=PATIENCE_S, job=self.process, said=lambda: self.printed[-6000:])
        wait(lambda: all((self.folder / f"rank-{rank}").exists() for rank in (0, 1)))
        # It goes back to an older step first, so steps are counted from a new line on.
        begin = steps_done(self.root)
        wait(lambda: steps_done(self.root) != begin)
        begin = steps_done(self.root)
        wait(lambda: steps_done(self.root) >= begin + num_steps)

    def pid_of(self, target: str) -> int:
        """target: "rank 0", "launcher", ..."""
        if target.startswith("rank "):
            return self._rank(int(target[5:]))
        above = psutil.Process(self._rank(1)).parents()[::-1]
        above = above[[process.pid for process in above].index(self.process.pid) :]
        assert len(above) >= len(self.launch.above), [process.cmdline() for process in above]
        return above[self.launch.above.index(target)].pid

    def _rank(self, number: int) -> int:
        return int((self.folder / f"rank-{number}").read_text().split()[0])

    def left(self) -> list[int]:
        """Processes that have come of the command and have not ended."""
        self.process.poll()
        environs = [(process.pid, process.info["environ"]) for process in psutil.process_iter(["environ"])]
        return [pid for pid, environ in environs if environ and environ.get(_TAG) == self.tag]  # none: a zombie

    def kill(self) -> None:
        """Nothing is left."""
        while left := self.left():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()


def set_pace(folder: Path, seconds: float) -> None:
    """Of the run with this folder, from its next step on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pace.new").write_text(str(seconds))
    (folder / "pace.new").replace(folder / "pace")  # whole: it is read at any moment


def _begin() -> None:
    """In the new process: it does not outlive this one, and signals mean what they mean in a terminal (of a shell's
    background job, or under nohup, they would stay ignored)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
