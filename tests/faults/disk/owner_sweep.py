"""The record that says whose a folder is: taken over from a run that is gone, kept, removed."""

from pathlib import Path

from partial_fc.checkpoint import lock
from partial_fc.errors import describe
from tests.faults.disk.crash_states import Tree
from tests.faults.disk.operations import Disk
from tests.faults.disk.sweep import Sweep, Wrong, difference, listening


class OwnerSweep(Sweep):
    """Whatever happens, the next run gets the folder, and its record is the only one."""

    def __init__(self, disk: Disk):
        super().__init__(disk, "owner", 1)
        lock._STALE_S, lock._POLL_S = 0.02, 0.002  # a record that the power cut off is nobody's soon
        self.root = disk.below / "a"
        self.ground.place({"a": None})
        self.forked(lambda: lock.acquire(self.root, "gone"))
        self.start = self.ground.read()

    def act(self) -> list[str]:
        self.disk.rank(0)
        said: list[str] = []
        with listening(said):
            try:
                self._act()
            except OSError as error:
                said.append(describe(error))
                self.disk.heal()
                for path in lock._records(self.root):  # a run whose start has failed ends, and its record is stale
                    if (found := lock._read(path)) and found.run == "run":
                        path.unlink()
                self._act()
        self.disk.rank(-1)
        return said

    def _act(self) -> None:
        mine, _ = lock.acquire(self.root, "run")
        try:
            mine.check()
            lock._rewrite(mine.find(), mine.record, 1)
            mine.release()
        finally:
            mine._ended.set()

    def check(self, tree: Tree, promised: bool) -> None:
        """Nothing can be promised of a record but that it is read for what it is."""

    def check_fault(self, struck: Path, said: list[str], tree: Tree) -> None:
        if tree != self.end and not any(str(struck) in line for line in said):
            raise Wrong(f"nothing names {struck}: {said}; {difference(tree, self.end)}")
        self.ground.place(self.left_by_the_dead(tree))
        self.recover(tree, ended=False)

    def recover(self, tree: Tree, ended: bool) -> None:
        mine, _ = lock.acquire(self.root, "next")
        mine.check()
        records = [path for path in self.ground.read() if "owner-" in path]
        if len(records) != 1:
            raise Wrong(f"whose is it: {records}")
        mine.release()
        self.ground.read()
