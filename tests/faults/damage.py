"""Damages the newest checkpoints of a training, in random places, and lets it go on:

    python -m tests.faults.damage FOLDER --rounds 1000 --runs 30 --seed 1

A round flips a byte of files, cuts them short or removes them (markers and lists of checksums, too) in one to three of
four checkpoints, which ranks of one folder or of one each have written. It then goes on as `--resume auto` does, or as
a rollback, with as many ranks (threads of this process) or another number: from the newest that nobody has touched, bit
for bit as from a folder in which nothing is damaged. Runs are whole trainings, by `Ranks`. AssertionError: it
is not so.
"""

import argparse
import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from partial_fc import checkpoint
from partial_fc.checkpoint.folders import folder_name
from partial_fc.checkpoint.peer.commits import ProcessState
from partial_fc.head import AdaFace, HardNegatives, PartialFC
from partial_fc.optim.backbone import named_state
from partial_fc.train import loop, resume
from partial_fc.train.begin.run_folder import hold_folders, release_folders
from partial_fc.train.job import Job
from partial_fc.train.run import Run
from recipes import face
from tests.faults.damaging import Done, damage_newest
from tests.faults.kills import EVERY, check_equal
from tests.faults.ranks import Ranks, flags, preload
from tests.parallel.train.test_update import CLASSES, D, job_of, make, micro_batches
from tests.unit.thread_world import ThreadWorld, in_world

STEPS = (1, 2, 3, 4)  # of which checkpoints are there


@dataclass
class Writers:
    """Who has written the checkpoints: so many ranks, into one folder or into one each."""

    size: int
    shared: bool
    folder: Path

    def root(self, rank: int, of: str = "run") -> Path:
        return self.folder / of / ("host" if self.shared else f"host{rank}")

    @property
    def roots(self) -> list[Path]:
        return [self.root(rank) for rank in range(1 if self.shared else self.size)]


# ---- rounds: what a run goes on from, and its next step


def _job(world: ThreadWorld) -> Job:
    """Whatever can be in a checkpoint is."""
    made = job_of(world, "fp32", "2bit")
    lists = HardNegatives(CLASSES, k=2, every=1)
    made.head = PartialFC(CLASSES, D, AdaFace(), sample_rate=0.3, world=world, hard_negatives=lists)
    made.facts = {"recipe": "face", "configuration": {}}
    made.class_names = [f"n{number}" for number in range(CLASSES)]
    return made


def _step(job: Job) -> float:
    loss = make(job, micro_batches(job.world, job.at.step, 1))
    job.at.position += 4 * job.world.size
    return loss


# Once: what reads command lines is not made for threads.
_PARSED = face.parse(["--dataset=synthetic", f"--num-classes={CLASSES}"])[0]


def _config(root: Path) -> Any:
    return replace(_PARSED, run=replace(_PARSED.run, models_root=root))


@contextmanager
def _held(world: ThreadWorld, root: Path) -> Iterator[Run]:
    """A run that has the folder."""
    job_log = job_of(world).logger
    run = Run("face", _config(root), world, torch.device("cpu"), job_log, ProcessState(), versions={})
    hold_folders(run.config, world, run.process)
    try:
        yield run
    finally:
        release_folders(run.process)


def write(writers: Writers) -> None:
    """Trains, with a checkpoint after each step."""

    def train(world: ThreadWorld) -> None:
        root = writers.root(world.rank)
        with _held(world, root) as run, closing(_saver(run)) as saver:
            job = _job(world)
            for _ in STEPS:
                _step(job)
                saver.begin(loop.snapshot(job))
                saver.finish()

    in_world(writers.size, train)
    (writers.folder / "run").rename(writers.folder / "base")


def _saver(run: Run) -> checkpoint.Saver:
    return checkpoint.Saver(
        run.config.run.checkpoints, run.world, len(STEPS), True, run.process.locks.get(run.config.run.checkpoints)
    )


def go_on(writers: Writers, size: int, back: bool) -> list[tuple[int, float, dict[str, Any]]]:
    """By rank: the step that was gone on from, the loss of the next one, and the state after it. back: by a run that
    has come further, and rolls back."""

    def act(world: ThreadWorld) -> tuple[int, float, dict[str, Any]]:
        root = writers.root(world.rank)
        with _held(world, root) as run:
            job = _job(world)
            if back:
                for _ in range(2):
                    _step(job)
                with closing(_saver(run)) as saver:
                    start = resume.restore(run, job.backbone, job.head, saver)
                assert start is not None
                job.head.discard()
                job.at.step, job.at.position = start
            else:
                job.at = resume.resume(run, job.backbone, job.head)
            step = job.at.step
            job.backbone.train()
            return step, _step(job), _state(job)

    return in_world(size, act)


def _state(job: Job) -> dict[str, Any]:
    backbone, head = job.backbone, job.head
    assert isinstance(head, PartialFC)
    assert head.hard_negatives is not None
    tensors = {**backbone.weights.state_dict(), **named_state(backbone.optimizer, backbone.weights)}
    tensors |= {**backbone.sync.state(), **backbone.state()[2], **head.row_state(), **head.hard_negatives.state()}
    return {name: t.clone() for name, t in tensors.items()} | {"facts": head.facts(), "position": job.at.position}


def _same(one: Any, two: Any) -> bool:
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


class Rounds:
    """A round after the other, in folders of all kinds of writers."""

    def __init__(self, folder: Path, seed: int):
        logging.getLogger("partial_fc").setLevel(logging.CRITICAL)  # each round says all that it is to say
        self.random = Random(seed)
        kinds = ((1, True), (2, True), (2, False), (3, True), (3, False))
        self.writers = [Writers(size, shared, folder / f"{size}-{shared}") for size, shared in kinds]
        for writers in self.writers:
            write(writers)
        self._expected: dict[tuple[Path, int, bool, int], list[tuple[int, float, dict[str, Any]]]] = {}

    def round(self) -> Counter[str]:
        random = self.random
        writers = random.choice(self.writers)
        size = random.choice((writers.size, writers.size, 1, 2, 3)) if writers.shared else writers.size
        back = random.random() < 0.25
        self._lay_out(writers)
        # Lists of hard negatives are of no use to another number of ranks, who do not look at them.
        done = damage_newest(writers.roots, random, STEPS, "hard-negatives" if size != writers.size else "none")
        before = _bytes_of(writers)
        found = go_on(writers, size, back)
        what = f"{writers}, {size} ranks, back {back}, {done}"
        assert [step for step, _, _ in found] == [done.whole] * size, what
        for (_, loss, state), (_, loss_too, state_too) in zip(
            found, self._from(writers, size, back, done.whole), strict=True
        ):
            assert loss == loss_too, what
            assert state.keys() == state_too.keys(), what
            assert all(_same(value, state_too[name]) for name, value in state.items()), what
        self._check_folders(writers, done, before, what)
        return done.kinds + Counter({"checkpoints": STEPS[-1] - done.whole, "rollbacks": int(back)})

    def _lay_out(self, writers: Writers) -> None:
        shutil.rmtree(writers.folder / "run", ignore_errors=True)
        shutil.copytree(writers.folder / "base", writers.folder / "run")

    def _from(self, writers: Writers, size: int, back: bool, step: int) -> list[tuple[int, float, dict[str, Any]]]:
        """What comes of a folder whose newest checkpoint is of this step."""
        key = (writers.folder, size, back, step)
        if key not in self._expected:
            kept = writers.folder / "damaged"
            (writers.folder / "run").rename(kept)
            self._lay_out(writers)
            for root in writers.roots:
                for later in range(step + 1, STEPS[-1] + 1):
                    shutil.rmtree(root / "checkpoints" / folder_name(later))
            self._expected[key] = go_on(writers, size, back)
            shutil.rmtree(writers.folder / "run")
            kept.rename(writers.folder / "run")
        return self._expected[key]

    def _check_folders(self, writers: Writers, done: Done, before: dict[str, bytes], what: str) -> None:
        """Damaged ones have another name; no byte of any is another one."""
        after = _bytes_of(writers)
        for step in STEPS:
            aside = step > done.whole and step not in done.unmarked
            name = folder_name(step) + (".damaged" if aside else "")
            for root in writers.roots:
                assert (root / "checkpoints" / name).is_dir(), what
        assert {name.replace(".damaged/", "/"): data for name, data in after.items()} == before, what


def _bytes_of(writers: Writers) -> dict[str, bytes]:
    run = writers.folder / "run"
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("step-*/*")}


# ---- runs


class Runs:
    """Whole trainings, whose checkpoints are damaged before they are started again."""

    num_steps = 4 * EVERY

    def __init__(self, folder: Path, seed: int, sizes: tuple[int, ...]):
        preload()
        self.folder, self.random = folder, Random(seed)
        for size in sizes:
            running = self._start(self.folder / f"whole-{size}", size)
            assert running.wait(self.num_steps) == [0] * size, running.output()

    def _start(self, root: Path, size: int) -> Ranks:
        words = [*flags(root, self.num_steps, EVERY), "--keep-checkpoints", "9", "--num-classes", "500"]
        return Ranks(root.with_name(f"output-{root.name}"), words, size)

    def run(self, size: int) -> Counter[str]:
        whole, damaged = self.folder / f"whole-{size}", self.folder / f"damaged-{size}"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(whole, damaged)
        shutil.rmtree(damaged / "checkpoints" / folder_name(self.num_steps))
        steps = tuple(range(EVERY, self.num_steps, EVERY))
        done = damage_newest([damaged], self.random, steps)
        running = self._start(damaged, size)
        assert running.wait(self.num_steps) == [0] * size, running.output()
        printed = running.output(0)
        assert f"resumed from {damaged}/checkpoints/{folder_name(done.whole)}" in printed, printed[-3000:]
        for step in steps[steps.index(done.whole) + 1 :]:
            if step not in done.unmarked:
                assert f"{folder_name(step)}.damaged; remove it" in printed, printed[-3000:]
        for aside in damaged.glob("checkpoints/*.damaged"):
            shutil.rmtree(aside)
        check_equal(whole, damaged, self.num_steps)
        return done.kinds


def attack(folder: Path, rounds: int, runs: int, seed: int) -> dict[str, Any]:
    """Returns figures."""
    many, counts, start = Rounds(folder / "rounds", seed), Counter[str](), time.monotonic()
    for _ in range(rounds):
        counts += many.round()
    rounds_s = time.monotonic() - start
    sizes = (2, 1, 3)[:runs]
    trainings = Runs(folder / "runs", seed, sizes)
    for number in range(runs):
        counts += trainings.run(sizes[number % len(sizes)])
    return {
        "rounds": rounds,
        "runs": runs,
        "seed": seed,
        "damaged": dict(sorted(counts.items())),
        "rounds_s": round(rounds_s),
        "runs_s": round(time.monotonic() - start - rounds_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.damage", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(json.dumps(attack(options.folder, options.rounds, options.runs, options.seed)), flush=True)


if __name__ == "__main__":
    main()
