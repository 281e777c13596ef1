"""Every operation of a save, each in every way that a disk may fail; and the states that a disk may be left in: no
folder that counts is ever bad, a whole checkpoint always stays, the next save is whole."""

import errno
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from partial_fc.checkpoint import lock
from partial_fc.checkpoint.folders import MARKER, folder_name
from tests.faults.disk import operations as op
from tests.faults.disk.crash_states import Cut, Model, Tree, cuts
from tests.faults.disk.ground import Ground
from tests.faults.disk.judge import Judge, Wrong
from tests.faults.disk.operations import CRASHED, Disk, Fault, Operation
from tests.faults.disk.save_scenarios import SIZE, Ranks, Saves

# States of each cut, beside those that are chosen: where nothing failed before, and where something did.
_RANDOM_STATES, _RANDOM_STATES_OF_A_FAULT = 8, 1


class Sweep:
    """Saves in one scenario and one layout of folders."""

    def __init__(self, disk: Disk, layout: str, roots: tuple[str, ...], what: Saves):
        self.disk, self.name, self.what, self.roots = disk, f"{what.name}, {layout}", what, roots
        self.hosts = ("",) if len(set(roots)) == 1 else ("", "a", "b")  # the folders that each have a machine
        self.ground = Ground(disk.below)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.end: Tree = {}  # what is there where nothing fails
        self._seen: set[tuple] = set()
        self._recovered: set[tuple] = set()
        self._chance = random.Random(1)
        self._dead = self.forked(lambda: None)[0]
        lock._STALE_S, lock._POLL_S = 0.02, 0.002  # a record that the power cut off is nobody's soon
        self.judge = Judge(self.ground, roots)
        self.ranks = Ranks(disk, roots, self._when_failed)
        self._failures = [0] * SIZE
        self.ground.place({"a": None, "b": None})
        for step in what.before:
            self.ranks.save(Saves("", (), step, what.best, keep=9), watched=False)
        self.start = self.ground.read()  # what is there before

    # ---- what it is

    def act(self) -> list[str]:
        said = self.ranks.save(self.what)
        self._failures = said.failures
        return said.lines

    def _when_failed(self) -> None:
        self.judge.check(self.ground.read(), self.what.stands)

    def check(self, tree: Tree, promised: bool) -> None:
        self.judge.check(tree, self.what.step if promised else self.what.stands)
        if tree == self.end and self.judge.steps(tree) != self.what.kept:
            raise Wrong(f"steps {sorted(self.judge.steps(tree))}, not {sorted(self.what.kept)}")

    def check_fault(self, struck: Path, said: list[str], tree: Tree) -> None:
        self.check(tree, promised=True)  # once the disk was well again
        if len(set(self._failures)) > 1:
            raise Wrong(f"failures by rank: {self._failures}; {said}")
        name = str(struck).removesuffix(".partial")
        if (self._failures[0] or tree != self.end) and not any(name in line for line in said):
            raise Wrong(f"nothing names {name}: {said}; {difference(tree, self.end)}")

    def recover(self, tree: Tree, ended: bool) -> None:
        if ended:
            self.ranks.save(self.what, watched=False)
        else:
            self.ranks.save_simply(self.what)
        self.counts["saves after it"] += 1
        tree = self.ground.read()
        self.judge.check(tree, self.what.step)
        left = [path for path in tree if path.endswith(".partial") and f"/{folder_name(self.what.step)}/" in path]
        if left:
            raise Wrong(f"left among the files of a checkpoint: {left}")

    def reads(self, tree: Tree) -> tuple:
        """Names; of contents the manifests', for their scores, and the owners'."""
        return tuple((p, c if p.endswith((".json", MARKER)) else c is None) for p, c in sorted(tree.items()))

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
        for rank in range(SIZE):
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
