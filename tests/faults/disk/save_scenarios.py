"""Two ranks save: what is there before, what they do, and what has to hold whatever their disk does meanwhile."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from partial_fc.checkpoint import Saver, Snapshot, capture
from partial_fc.checkpoint.folders import folder_name, mark, prune, unmark
from partial_fc.checkpoint.lock import Fence, FolderLock, Record, acquire
from partial_fc.checkpoint.saver import ranks_beside
from partial_fc.comm import World, all_gather_json
from partial_fc.errors import describe
from partial_fc.files import make_folders
from partial_fc.head import PartialFC
from tests.faults.disk import operations as op
from tests.faults.disk.operations import Disk
from tests.unit.stored_checkpoints import heads_of
from tests.unit.thread_world import Meeting, in_world

SIZE = 2
LAYOUTS = {"one folder": ("a/runs/checkpoints",) * SIZE, "a folder each": ("a/runs/checkpoints", "b/runs/checkpoints")}


@dataclass(frozen=True)
class Saves:
    """Checkpoints of `before` are there, of which that of `best` has the highest score; that of `step` is saved."""

    name: str
    before: tuple[int, ...]
    step: int
    best: int | None = None
    keep: int = 3

    @property
    def stands(self) -> int:
        """The newest that is there whatever becomes of this one; 0: none."""
        return max((step for step in self.before if step != self.step), default=0)

    @property
    def kept(self) -> set[int]:
        """What is there at the end."""
        steps = sorted({*self.before, self.step})
        return {*steps[-self.keep :]} | ({self.best} if self.best else set())


SAVES = (Saves("new", (), 1), Saves("re-save", (1, 2), 2), Saves("prune", (1, 2, 3), 4, best=1, keep=1))


@contextmanager
def listening(lines: list[str]) -> Iterator[list[str]]:
    """What is logged becomes lines, and is shown nowhere."""
    logger, handler = logging.getLogger("partial_fc"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


class Said(NamedTuple):
    """What was logged and raised, of all ranks; and how often each failed."""

    lines: list[str]
    failures: list[int]


class Ranks:
    """Threads that save into folders of their own, or into one."""

    def __init__(self, disk: Disk, roots: tuple[str, ...], when_failed: Callable[[], None]):
        """when_failed: called when all ranks have failed, before the disk is well again."""
        self.disk, self.when_failed = disk, when_failed
        self.roots = [disk.below / root for root in roots]
        self._heads: list[PartialFC] = heads_of(SIZE, num_classes=5)
        self._snapshots: dict[tuple[int, int, bool], Snapshot] = {}

    def snapshot(self, rank: int, step: int, is_best: bool) -> Snapshot:
        if (rank, step, is_best) not in self._snapshots:
            self._snapshots[rank, step, is_best] = capture(
                step,
                {"w": torch.full((8,), float(step))},
                {"w/momentum_buffer": torch.ones(8)},
                {"buffer/b": torch.ones(2) * rank},
                self._heads[rank],
                {"position": step, "score": 0.9 if is_best else 0.5},
                world=self._heads[rank].world,
                class_names=[f"n{i}" for i in range(5)],
            )
        return self._snapshots[rank, step, is_best]

    def save(self, what: Saves, watched: bool = True) -> Said:
        """Until it is saved: where the disk does not let them, once more, on one that is well again. Whoever waits for
        ten seconds waits for ever."""
        said = Said([], [0] * SIZE)
        note = (lambda: self.disk.note(op.MEETING)) if watched else None
        with listening(said.lines):
            in_world(SIZE, lambda world: self._save(world, what, said, watched), Meeting(SIZE, 10, note))
        return said

    def _save(self, world: World, what: Saves, said: Said, watched: bool) -> None:
        def begin() -> None:
            if watched:
                self.disk.rank(world.rank)

        def again(error: str = "") -> None:
            said.failures[world.rank] += 1
            said.lines.append(error)
            world.barrier()
            if world.rank == 0:
                self.disk.rank(-1)
                self.when_failed()
                self.disk.heal()
                begin()
                for root in self.roots if error else ():  # a run that could not begin ends: its record is nobody's
                    for path in root.glob("owner-*.json"):
                        path.unlink()
            world.barrier()

        begin()
        while True:
            try:
                owner, saver = self._start(world, what)
                break
            except ValueError as error:
                again(str(error))
        with closing(saver):
            saver._thread.submit(begin).result()
            while True:
                saver.begin(self.snapshot(world.rank, what.step, what.step == what.best))
                saver.finish()
                saver._thread.submit(int).result()  # older ones have been removed
                if not saver.last_failed:
                    break
                again()
            if watched:
                self.disk.note(op.PROMISE, what.step)
            world.barrier()
        if owner:
            owner.release()

    def _start(self, world: World, what: Saves) -> tuple[FolderLock | None, Saver]:
        root = self.roots[world.rank]
        keeper = ranks_beside(root, world)[0]
        owner, problem = None, ""
        if keeper == world.rank:
            try:
                owner, _ = acquire(root, f"run{world.rank}")
            except OSError as error:
                problem = describe(error)
        said_W = all_gather_json([problem, asdict(owner.record) if owner else {}], world, "t/owner")
        try:
            if any(said for said, _ in said_W):
                raise ValueError(problem or "another rank")
            return owner, Saver(root, world, what.keep, lock=owner or Fence(root, Record(**said_W[keeper][1])))
        except ValueError:
            if owner:
                owner.release()
            raise

    def save_simply(self, what: Saves) -> None:
        """What the threads do, one after the other: in a folder where it is only asked what becomes of it."""
        for root in self.roots:
            make_folders(root)
        owners = [acquire(root, "again")[0] for root in dict.fromkeys(self.roots)]
        leads = [self.roots.index(root) == rank for rank, root in enumerate(self.roots)]
        folders = [root / folder_name(what.step) for root in self.roots]
        for folder in dict.fromkeys(folders):
            unmark(folder)
        for rank, folder in enumerate(folders):
            self.snapshot(rank, what.step, what.step == what.best).write(folder, leads[rank])
        for folder in dict.fromkeys(folders):
            mark(folder, what.step, [rank for rank, other in enumerate(folders) if other == folder])
        for root, owner in zip(dict.fromkeys(self.roots), owners, strict=True):
            prune(root, what.keep, True, owner.check)
            owner.release()
