"""Ranks of small trainings, forked from one process that has imported everything: starting them takes no time."""

import os
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from partial_fc.verbs import train as train_command
from partial_fc.verbs.checkpoint.verify import findings
from tests.recipes.launch import start
from tests.recipes.several import become_rank
from tests.waiting import free_port

# 20,000 classes: a checkpoint is some megabytes in each rank's file, so that there is time to be killed in the middle.
JOB = shlex.split(
    "--dataset synthetic --num-classes 20000 --num-images 256 --image-size 24 --batch-size 4 --backbone tiny "
    "--embedding-size 32 --scale 16 --optimizer adamw --weight-decay 0.05 --lr 0.003 --lr-scaling none "
    "--sample-rate 0.1 --warmup-epochs 0 --warmup-steps 2 --num-workers 1 --precision fp32 --frequent 10 --verbose 0 "
    "--keep-checkpoints 2 --comm-timeout 60 --start-timeout 15"
)
PATIENCE_S = 120.0


def flags(models_root: Path, num_steps: int, every: int) -> list[str]:
    """Of the job: how long it is, steps from one checkpoint to the next."""
    words = f"--max-steps {num_steps} --checkpoint-every {every}"
    return [*JOB, "--models-root", str(models_root), *words.split()]


def train(flags: list[str]) -> None:
    train_command.exit_now(train_command.main(["face", *flags], "train.py"))


class Ranks:
    """`train.py face FLAGS` in `size` processes, as torchrun would start them. Output: FOLDER/output.RANK."""

    def __init__(self, folder: Path, flags: list[str], size: int = 2) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.outputs = [folder / f"output.{rank}" for rank in range(size)]
        port = free_port()
        for output in self.outputs:
            output.write_text("")
        self.processes = [
            start(become_rank, rank, size, port, str(output), train, flags) for rank, output in enumerate(self.outputs)
        ]

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Where it has not ended yet."""
        with suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid or 0, number)

    def poll(self) -> bool:
        """Have all ended?"""
        return all(process.exitcode is not None for process in self.processes)

    def wait(self, num_steps: int = 0) -> list[int | None]:
        """The statuses of all, which have so many steps to go. AssertionError: one does not end, and is killed."""
        seconds = PATIENCE_S + 2 * num_steps
        if not self.until(lambda: False, seconds):
            left = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
            for rank in left:
                self.signal(rank)
            raise AssertionError(f"rank(s) {left} have not ended after {seconds} s\n{self.output()}")
        return [process.exitcode for process in self.processes]

    def until(self, happened: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
        """Waits until this has happened, or all have ended; False: neither has in time."""
        give_up = time.monotonic() + seconds
        while not happened():
            if self.poll():
                return True
            if time.monotonic() > give_up:
                return False
            time.sleep(0.001)
        return True

    def output(self, rank: int | None = None) -> str:
        """Of one rank, or the end of what each printed."""
        if rank is not None:
            return self.outputs[rank].read_text()
        return "\n".join(f"--- rank {r}\n{self.output(r)[-3000:]}" for r in range(len(self.outputs)))


def complete(models_root: Path) -> list[Path]:
    """The checkpoints that count, oldest first."""
    return sorted(marker.parent for marker in (models_root / "checkpoints").glob("step-*/COMPLETE"))


def check_whole(models_root: Path) -> None:
    for folder in complete(models_root):
        bad = [text for kind, text in findings([folder], finite=True) if kind == "bad"]
        assert not bad, f"{folder} counts, but: {bad}"


def steps_done(models_root: Path) -> int:
    """By loss.csv; 0 before there is one."""
    path = models_root / "loss.csv"
    if not path.exists():
        return 0
    last = path.read_text().rpartition("\n")[0].rpartition("\n")[2]
    number = last.partition(",")[0]
    return int(number) if number.isdigit() else 0
