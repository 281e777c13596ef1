"""How tests start a trainer: in this process, in forked ranks, or as a user does.

    here("recipes.face.main", words)                                   in this process
    several([Given("recipes.face.main", words), ...], num_ranks=2)     run after run in one launch of forked ranks
    Ranks(folder, program, *arguments)                                 forked ranks that a test stops and kills
    run([*LAUNCHERS["torchrun"], ...])                                 a command line, to its end
    horovodrun -np 2 ... python -m tests.running GIVEN GIVEN ...       `several` under a launcher; each GIVEN as JSON

Ranks are forked from a process that has imported everything: starting them takes no time. A recipe is named by its
module, so that a new one needs nothing here. In `several` every rank prints "rank R ended with: " and the exit status
of each run, or the error that ended it. After one that trained, all ranks compare the weights that they compute with.
(That the parts of a run continue in processes of their own, launchers and their command lines: tests/faults/signals.)
"""

import contextlib
import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from partial_fc import comm
from partial_fc.train import loop
from partial_fc.train.job import Job, Outcome
from partial_fc.verbs.report.page import page
from partial_fc.verbs.report.run_facts import read_run
from partial_fc.verbs.train import exit_now
from tests.recipes.faults import put_in
from tests.waiting import free_port

ROOT = Path(__file__).parents[1]
PATIENCE_S = 240.0
_GRACE_S = 20.0  # from the first process that fails to the end of the others: they say what they know

# The demo, shrunk: seconds instead of minutes, fp32 so that launchers can be compared.
SMALL = shlex.split(
    "--backbone tiny --embedding-size 32 --scale 16 --loss combined --margins 1 0 0.2 --optimizer adamw "
    "--weight-decay 0.05 --lr 0.003 --lr-scaling none --lr-scheduler cosine --warmup-epochs 0 --warmup-steps 2 "
    "--num-workers 1 --precision fp32 --frequent 10 --verbose 0 --checkpoint-every 0"
)

# A file with a network of one's own, FILE.py:make. Of few layers: a compiler takes 40 to 90 s for `tiny`.
ENCODER = """
from torch import nn

def make(embedding_size, image_size):
    layers = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.PReLU(8), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8 * (image_size // 2) ** 2, embedding_size))
"""


LAUNCHERS = {
    "horovodrun --gloo": ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"],
    "horovodrun --mpi": ["horovodrun", "--mpi", "-np", "2", "-H", "localhost:2"],
    "torchrun": ["torchrun", "--standalone", "--nproc_per_node=2", "--no-python"],
}
# What a process that was forked has already. (It is forked from a server that computes nothing: what has gone backward
# once may not be forked.)
_PRELOADED = [
    "recipes.face.main",
    "recipes.mnist.main",
    "recipes.imagenet.main",
    "recipes.kinetics.main",
    "tests.running",
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


# ---- as a user does


def environment() -> dict[str, str]:
    scripts = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


def run(command: list[str], expect: int = 0) -> str:
    """Runs to the end and returns what it printed; fails, showing that, where the exit status is another."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    ended_well = done.returncode == 0
    assert ended_well == (expect == 0), f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout


# ---- in this process


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


# ---- in forked ranks


@dataclass(frozen=True)
class Given:
    """One run: a recipe's module, the words of its command line, faults (faults.py), its working directory."""

    recipe: str
    words: Sequence[str]
    faults: str = ""
    folder: str = str(ROOT)

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def run_given(runs: Sequence[Given]) -> None:
    """In a rank: runs them one after the other."""
    world = comm.init("cpu")
    end = world.close
    world.close = lambda: None  # type: ignore[method-assign]
    comm.init = lambda *_, **__: world
    for given in runs:
        put_in(given.faults, is_last=world.rank == world.size - 1)
        try:
            with contextlib.chdir(given.folder):
                ended = str(_comparing(given.recipe, world).main(list(given.words)))
        except (ValueError, FloatingPointError) as error:
            ended = f"{type(error).__name__}: {error}"
        print(f"rank {world.rank} ended with: {ended}\n", end="", flush=True)
    end()


def _comparing(recipe: str, world: comm.World):
    """The recipe's module; the loop's `train`, which it imports when it is called, compares the replicas at its end."""
    train = loop.train
    if not hasattr(train, "compares"):

        def train_and_compare(job: Job) -> Outcome:
            outcome = train(job)
            checksum = 0
            for p in job.backbone.module.parameters():  # type: ignore[attr-defined]
                checksum = zlib.crc32(p.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes(), checksum)
            all_W = world.all_gather(torch.tensor([checksum]), name="test/weights")
            assert (all_W == checksum).all(), "the replicas have parted"
            return outcome

        train_and_compare.compares = True  # type: ignore[attr-defined]
        loop.train = train_and_compare
    return importlib.import_module(recipe)


def become_rank(
    rank: int, num_ranks: int, port: int, output: str, program: Callable[..., object], *arguments: object
) -> None:
    """In a forked process, with what torchrun would tell it: program(*arguments). What it prints is appended to
    `output`."""
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    numbers = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    program(*arguments)


class Ranks:
    """program(*arguments), a module's function, in `size` forked processes, as torchrun would start them. Each prints
    to FOLDER/output.RANK."""

    def __init__(self, folder: Path, program: Callable[..., object], *arguments: object, size: int = 2) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.outputs = [folder / f"output.{rank}" for rank in range(size)]
        context, port = multiprocessing.get_context("forkserver"), free_port()
        context.set_forkserver_preload(_PRELOADED)
        self.processes = []
        for rank, output in enumerate(self.outputs):
            output.write_text("")
            told = (rank, size, port, str(output), program, *arguments)
            self.processes.append(context.Process(target=become_rank, args=told, daemon=True))
            self.processes[-1].start()

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Where it has not ended yet."""
        with suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid or 0, number)

    @property
    def statuses(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def poll(self) -> bool:
        """Have all ended?"""
        return None not in self.statuses

    def wait(self, seconds: float = PATIENCE_S) -> list[int | None]:
        """The statuses of all. AssertionError: one does not end, and is killed."""
        if not self.until(lambda: False, seconds):
            left = [rank for rank, status in enumerate(self.statuses) if status is None]
            for rank in left:
                self.signal(rank)
            raise AssertionError(f"rank(s) {left} have not ended after {seconds} s\n{self.output()}")
        return self.statuses

    def until(self, happened: Callable[[], object], seconds: float = PATIENCE_S) -> bool:
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


def ranks(num_ranks: int, program: Callable[..., object], *arguments: object, status: int = 0) -> str:
    """Runs Ranks to their end. Returns what they printed, rank after rank; fails where one ends with another status."""
    with tempfile.TemporaryDirectory() as folder:
        started = Ranks(Path(folder), program, *arguments, size=num_ranks)
        started.until(lambda: any(started.statuses))
        with suppress(AssertionError):
            started.wait(_GRACE_S)
        assert started.statuses == [status] * num_ranks, started.output()
        return "".join(started.output(rank) for rank in range(num_ranks))


def several(runs: Sequence[Given], num_ranks: int = 2) -> str:
    """Runs them one after the other in one launch. Returns what it printed; fails where a process does."""
    return ranks(num_ranks, run_given, runs)


def killed(given: Given, num_ranks: int, marker: Path, output: Path) -> None:
    """Kills the last rank (SIGKILL) of a run when a file is there. The others must fail. output: a folder."""
    started = Ranks(output, run_given, [given], size=num_ranks)
    assert started.until(marker.exists), started.output()
    assert not any(status is not None for status in started.statuses), started.output()
    started.signal(num_ranks - 1)
    assert started.wait()[-1] == -signal.SIGKILL


def endings(printed: str, rank: int) -> list[str]:
    """How the runs of a launch ended in one of its ranks: exit statuses, or errors."""
    start = f"rank {rank} ended with: "
    return [line.removeprefix(start) for line in printed.splitlines() if line.startswith(start)]


# ---- recipe face


def train_here(models_root: Path, flags: str) -> str:
    """Recipe `face` with the small settings, in this process; flags, split like a shell's words, come last and win.
    Returns its log."""
    given = face(models_root, flags)
    assert here(given.recipe, given.words) == 0
    return (models_root / "logs/rank-0000.log").read_text()


def face(models_root: Path, flags: str, faults: str = "") -> Given:
    """The same, to be run in one launch with others."""
    return Given("recipes.face.main", ["--models-root", str(models_root), *SMALL, *shlex.split(flags)], faults)


def train_several(runs: dict[Path, str], num_ranks: int = 2) -> str:
    """Recipe `face` for each folder with its flags, one after the other, in one launch. Returns what was printed."""
    printed = several([face(root, flags) for root, flags in runs.items()], num_ranks)
    assert endings(printed, 0) == ["0"] * len(runs), printed[-6000:]
    return printed


# ---- what a run leaves


def reported(root: Path) -> bool:
    """Whether the report of a finished run has all of its sections."""
    text = page(read_run(root))
    wanted = ("finished, step", "learning rate", "Evaluations", "What the network sees", "<h2>Versions")
    return all(words in text for words in wanted)


def losses(models_root: Path) -> list[float]:
    """The loss of every step, from loss.csv; the steps must be 1, 2, 3, ..."""
    rows = [line.split(",") for line in (models_root / "loss.csv").read_text().splitlines()[1:]]
    assert [int(step) for step, _, _ in rows] == list(range(1, len(rows) + 1))
    return [float(loss) for _, loss, _ in rows]


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Of a checkpoint, and its checksum."""
    path = folder / "manifest.json"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    for sums in folder.glob("*.sha256"):
        sums.write_text(sums.read_text().replace(before, after))


def same_tensors(one: Path, other: Path) -> int:
    """The number of files of tensors that two folders have. AssertionError: they differ, in any byte."""
    names, others = (sorted(path.name for path in folder.glob("*.safetensors")) for folder in (one, other))
    assert names == others
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), f"{other / name} is another one"
    return len(names)


def result(models_root: Path) -> dict:
    return json.loads((models_root / "result.json").read_text())


def steps_done(models_root: Path) -> int:
    """By loss.csv; 0 before there is one."""
    path = models_root / "loss.csv"
    if not path.exists():
        return 0
    last = path.read_text().rpartition("\n")[0].rpartition("\n")[2]
    number = last.partition(",")[0]
    return int(number) if number.isdigit() else 0


if __name__ == "__main__":
    run_given([Given(**json.loads(words)) for words in sys.argv[1:]])
    exit_now(0)
