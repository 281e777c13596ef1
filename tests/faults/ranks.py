"""Ranks of small trainings, forked from one process that has imported everything: starting them takes no time."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

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


def preload() -> None:
    """Before the first `Ranks`."""
    from recipes import face  # noqa: F401


class Ranks:
    """`train.py face FLAGS` in `size` processes, as torchrun would start them. Output: FOLDER/output.RANK."""

    def __init__(self, folder: Path, flags: list[str], size: int = 2) -> None:
        from tests.recipes.hang import free_port

        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.statuses: dict[int, int] = {}
        sys.stdout.flush()
        port = free_port()
        self.pids = [self._fork(rank, size, port, flags) for rank in range(size)]

    def _fork(self, rank: int, size: int, port: int, flags: list[str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            os.environ.update({name: str(value) for name, value in numbers.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            output = os.open(self.folder / f"output.{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            from partial_fc.verbs import train as train_command

            os._exit(train_command.main(["face", *flags], "train.py"))
        finally:  # whatever it raised is in its output
            import traceback

            traceback.print_exc()
            os._exit(1)

    def kill(self, rank: int) -> None:
        if rank not in self.statuses:
            os.kill(self.pids[rank], signal.SIGKILL)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def poll(self) -> bool:
        """Have all ended?"""
        for rank, pid in enumerate(self.pids):
            if rank not in self.statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return len(self.statuses) == len(self.pids)

    def wait(self, num_steps: int = 0) -> list[int]:
        """The statuses of all, which have so many steps to go. AssertionError: one does not end, and is killed."""
        seconds = PATIENCE_S + 2 * num_steps
        if not self.until(lambda: False, seconds):
            left = [rank for rank in range(len(self.pids)) if rank not in self.statuses]
            for rank in left:
                self.kill(rank)
            raise AssertionError(f"rank(s) {left} have not ended after {seconds} s\n{self.output()}")
        return [self.statuses[rank] for rank in range(len(self.pids))]

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
            return (self.folder / f"output.{rank}").read_text()
        return "\n".join(f"--- rank {r}\n{self.output(r)[-3000:]}" for r in range(len(self.pids)))


def steps_done(models_root: Path) -> int:
    """By loss.csv; 0 before there is one."""
    path = models_root / "loss.csv"
    if not path.exists():
        return 0
    last = path.read_text().rpartition("\n")[0].rpartition("\n")[2]
    number = last.partition(",")[0]
    return int(number) if number.isdigit() else 0
