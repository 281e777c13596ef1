"""Every operation of a tool that writes checkpoints, each in every way that a disk may fail; and every state that it
may leave. A tool leaves its input alone, and gives its output whole, or one that is refused."""

import contextlib
import io
from pathlib import Path

from partial_fc.checkpoint.folders import MARKER
from partial_fc.errors import describe
from partial_fc.verbs.checkpoint.reshard import ReshardOptions, reshard
from partial_fc.verbs.checkpoint.verify import findings
from tests.faults.disk import operations as op
from tests.faults.disk.crash_states import Tree
from tests.faults.disk.operations import Disk
from tests.faults.disk.sweep import Sweep, Wrong
from tests.unit.stored_checkpoints import heads_of, save


class ToolSweep(Sweep):
    """Resharding. All others write as it does (partial_fc/checkpoint/output.py)."""

    def __init__(self, disk: Disk):
        super().__init__(disk, "reshard", 1)
        self.out = disk.below / "a/b/out"
        self.ground.place({"in": None, "a": None})
        heads = heads_of(2, num_classes=5)
        self.given = tuple(save(disk.below / "in", heads, names=list("abcde"), hosts=[[0], [1]]))
        self.start = self.ground.read()

    def act(self) -> list[str]:
        self.disk.rank(0)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                reshard(ReshardOptions(self.given, self.out, 1))
            self.disk.note(op.PROMISE)
        except (OSError, ValueError) as error:
            return [describe(error)]
        finally:
            self.disk.rank(-1)
        return []

    def check(self, tree: Tree, promised: bool) -> None:
        for path in {*tree, *self.start}:
            if path.startswith("in") and tree.get(path, 0) != self.start.get(path, 0):
                raise Wrong(f"the input {path} is another one")
        there = {path: content for path, content in self._output(tree) if not path.endswith(".partial")}
        if tree == self.end:
            self._check_end(there)
        is_whole = there == dict(self._output(self.end))
        if promised and not is_whole:
            raise Wrong(f"the tool said that it had written; there is {sorted(there)}")
        if not is_whole and self._is_taken(there):
            raise Wrong(f"half an output that is not refused: {sorted(there)}")

    def _check_end(self, there: Tree) -> None:
        """What is written where nothing fails."""
        assert there
        assert [text for kind, text in findings([self.out]) if kind == "bad"] == []
        assert self._is_taken(there)

    def _output(self, tree: Tree) -> list[tuple[str, bytes | None]]:
        return [(path, content) for path, content in sorted(tree.items()) if path.startswith("a/b/out/")]

    def _is_taken(self, there: Tree) -> bool:
        return f"a/b/out/{MARKER}" in there

    def check_fault(self, struck: Path, said: list[str], tree: Tree) -> None:
        self.check(tree, promised=not said)
        if said and str(struck).removesuffix(".partial") not in said[0]:
            raise Wrong(f"does not name {struck}: {said[0]}")

    def recover(self, tree: Tree, ended: bool) -> None:
        """Done anew where there is no output: nothing that is left stands in its way."""
        if self._output(tree):
            return
        self.counts["outputs after it"] += 1
        self.disk.begin()
        said = self.act()
        assert not said, said
        self.check(self.ground.read(), promised=True)
