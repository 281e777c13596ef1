"""Every operation of something that writes, each in every way that a disk may fail; and the states that a disk may be
left in."""

import errno
import logging
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.faults.disk import operations as op
from tests.faults.disk.crash_states import Cut, Model, Tree, cuts
from tests.faults.disk.ground import Ground
from tests.faults.disk.operations import CRASHED, Disk, Fault, Operation

# States of each cut, beside those that are chosen: where nothing failed before, and where something did.
_RANDOM_STATES, _RANDOM_STATES_OF_A_FAULT = 8, 1


class Wrong(AssertionError):
    """Something that must never be."""


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


class Sweep:
    """One thing that is done, by `size` ranks. What is to be said of it, in a class of its own: `act`, `check`,
    `check_fault`, `recover`."""

    start: Tree  # what is there before

    def __init__(self, disk: Disk, name: str, size: int, hosts: Sequence[str] = ("",)):
        """hosts: the folders that each have a machine of their own."""
        self.disk, self.name, self.size, self.hosts = disk, name, size, hosts
        self.ground = Ground(disk.below)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.end: Tree = {}  # what is there where nothing fails
        self._seen: set[tuple] = set()
        self._recovered: set[tuple] = set()
        self._chance = random.Random(1)
        self._dead = self.forked(lambda: None)[0]

    # ---- what it is

    def act(self) -> list[str]:
        """Does it, with the log. Returns what the user is told."""
        raise NotImplementedError

    def check(self, tree: Tree, promised: bool) -> None:
        """tree: what is on the ground, whatever happened. promised: it was said to be done. Raises Wrong."""
        raise NotImplementedError

    def check_fault(self, struck: Path, said: list[str], tree: Tree) -> None:
        """After an operation on a path was made to fail. Raises Wrong."""
        raise NotImplementedError

    def recover(self, tree: Tree, ended: bool) -> None:
        """It is done anew, on what is on the ground. ended: after a process that was just ended there. Raises Wrong
        where it cannot be."""
        raise NotImplementedError

    def reads(self, tree: Tree) -> tuple:
        """All of a tree on which it depends how it is done anew."""
        return tuple(sorted(tree.items()))

    # ---- what happens to it

    def run(self) -> None:
        """Counts what was tried, and keeps what was wrong."""
        log = self._undisturbed()
        self._states("", log, list(cuts(log)), _RANDOM_STATES)
        for fault in self._faults(log):
            try:
                self._run(fault)
            except Exception as error:
                self._found(str(fault), error)

    def _found(self, when: str, error: Exception) -> None:
        where = "" if isinstance(error, Wrong) else "".join(traceback.format_tb(error.__traceback__)[-3:])
        self.wrong.append(f"{self.name}, {when}: {type(error).__name__}: {error}\n{where}")

    def _undisturbed(self) -> list[Operation]:
        self.ground.place(self.start)
        self.disk.begin()
        self.act()
        log = self.disk.log()
        self.end = self.ground.read()
        model = Model(self.start)
        for operation in log:
            model.apply(operation)
        # Nothing was written in a way that the log does not see.
        assert model.whole() == self.end, difference(model.whole(), self.end)
        assert not any(operation.kind == op.MAPPED for operation in log)
        self.counts["operations"] = sum(operation.kind not in op.NOTES for operation in log)
        self.check(self.end, promised=True)
        return log

    def _faults(self, log: Sequence[Operation]) -> Iterator[Fault]:
        lasting = "from there on, all ranks" if self.hosts == ("",) else "from there on"
        for rank in range(self.size):
            mine = [o for o in log if o.rank == rank and o.kind not in op.NOTES]
            for at, operation in enumerate(mine):
                yield Fault(rank, at, "fail", errno.EIO)
                if operation.changes or operation.kind in (op.SYNC, op.CLOSE):
                    yield Fault(rank, at, "crash")
                    yield Fault(rank, at, "fail", errno.ENOSPC)
                    yield Fault(rank, at, "fail", errno.EIO, lasting)
                if operation.kind == op.WRITE:
                    yield Fault(rank, at, "short")

    def _run(self, fault: Fault) -> None:
        self.ground.place(self.start)
        self.disk.begin(fault)
        if fault.what == "crash":
            self._crash()
            return
        said = self.act()
        self.disk.heal()
        struck, tree, log = self.disk.struck, self.ground.read(), self.disk.log()
        if struck is None:  # there are fewer operations where the ranks meet in another order
            return
        self.counts[str(fault).partition(" at ")[0]] += 1
        self.check_fault(self.disk.below / struck, said, tree)
        if fault.error == errno.EIO and fault.how_long == "once":
            some = [lambda: log, self._chance.choice(list(cuts(log)))]
            self._states(f"{fault}, ", log, some, _RANDOM_STATES_OF_A_FAULT)

    def _crash(self) -> None:
        _, status = self.forked(self.act)
        tree = self.ground.read()
        if status == 0:
            return
        assert status == CRASHED, f"exit status {status}"
        self.counts["crash"] += 1
        self.check(tree, self._is_promised(self.disk.log()))
        self.disk.begin()
        self.recover(tree, ended=True)

    def forked(self, act: Callable[[], object]) -> tuple[int, int]:
        """(the number of a process that did this, its exit status)."""
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                act()
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        return pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def left_by_the_dead(self, tree: Tree) -> Tree:
        """Whoever's record is in it lives no more."""
        mine, dead = b'"process": %d' % os.getpid(), b'"process": %d' % self._dead
        return {p: c.replace(mine, dead) if c and "/owner-" in p else c for p, c in tree.items()}

    @staticmethod
    def _is_promised(log: Sequence[Operation]) -> bool:
        return any(operation.kind == op.PROMISE for operation in log)

    def _states(self, when: str, log: Sequence[Operation], some: Sequence[Cut], count: int) -> None:
        """Those in which the disk may be left where it was done so far. some: cuts of the log; count: see the model."""
        for cut in (take() for take in some):
            model = Model(self.start)
            try:
                for operation in cut:
                    model.apply(operation)
            except KeyError:  # in a folder of another rank's, which had not come so far: cannot be
                continue
            promised = self._is_promised(cut)
            for tree in model.states(count, self._chance, self._chance.choice(self.hosts)):
                try:
                    self._judge(tree, promised)
                except Exception as error:
                    last = next((o for o in reversed(cut) if o.kind not in op.NOTES), None)
                    self._found(f"{when}power lost after {last}, {len(cut)} of {len(log)}", error)

    def _judge(self, tree: Tree, promised: bool) -> None:
        tree = self.left_by_the_dead(tree)
        key = (promised, *sorted(tree.items()))
        if key in self._seen:
            return
        self._seen.add(key)
        self.counts["crash states"] += 1
        self.ground.place(tree)
        self.check(tree, promised)
        read = self.reads(tree)
        if read not in self._recovered:
            self._recovered.add(read)
            self.recover(tree, ended=False)


def difference(one: Tree, two: Tree) -> list[str]:
    return [path for path in sorted({*one, *two}) if one.get(path, 0) != two.get(path, 0)]
