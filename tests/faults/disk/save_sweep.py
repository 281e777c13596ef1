"""Saves: no folder that counts is ever bad, a whole checkpoint always stays, the next save is whole."""

from collections.abc import Sequence
from pathlib import Path

from partial_fc.checkpoint import lock
from partial_fc.checkpoint.folders import MARKER, folder_name, step_of
from partial_fc.verbs.checkpoint.verify import findings
from tests.faults.disk.crash_states import Tree
from tests.faults.disk.ground import Ground
from tests.faults.disk.operations import Disk
from tests.faults.disk.save_scenarios import SIZE, Ranks, Saves
from tests.faults.disk.sweep import Sweep, Wrong, difference


class Judge:
    """Knows which checkpoints are whole: by asking `partial-fc checkpoint verify`, once for each content."""

    def __init__(self, ground: Ground, roots: Sequence[str]):
        self._ground = ground
        self._roots = list(dict.fromkeys(roots))
        self._whole: set[tuple] = set()

    def check(self, tree: Tree, stands: int) -> None:
        """tree: what is on the ground. Raises Wrong where a folder that counts is not whole, or the checkpoint of
        `stands` or a later one is not there for all ranks."""
        complete = [self._complete(tree, root) for root in self._roots]
        for steps in complete:
            for step, content in steps.items():
                self._ask((content,), step)
        common = set.intersection(*map(set, complete))
        for step in common:
            self._ask(tuple(steps[step] for steps in complete), step)
        if max(common, default=0) < stands:
            found = " and ".join(str(sorted(steps)) for steps in complete)
            raise Wrong(f"no checkpoint of step {stands} or later counts for all ranks: {found}")

    def steps(self, tree: Tree) -> set[int]:
        """Those that count for all ranks."""
        return set.intersection(*(set(self._complete(tree, root)) for root in self._roots))

    @staticmethod
    def _complete(tree: Tree, root: str) -> dict[int, tuple]:
        """Step -> (root, content of its folder), of those with a marker."""
        marked = {path.rpartition("/")[0] for path in tree if path.startswith(f"{root}/") and path.endswith(MARKER)}
        return {
            step_of(Path(folder)): (root, *((p, c) for p, c in sorted(tree.items()) if p.startswith(f"{folder}/")))
            for folder in marked
        }

    def _ask(self, folders: tuple, step: int) -> None:
        if folders in self._whole:
            return
        paths = [self._ground.folder / content[0] / folder_name(step) for content in folders]
        for kind, text in findings(paths, finite=False):
            if kind == "bad" or (len(folders) == len(self._roots) and "others' were not checked" in text):
                raise Wrong(f"{', '.join(map(str, paths))} counts, but: {text}")
        self._whole.add(folders)


class SaveSweep(Sweep):
    """One scenario in one layout of folders."""

    def __init__(self, disk: Disk, layout: str, roots: tuple[str, ...], what: Saves):
        hosts = ("",) if len(set(roots)) == 1 else ("", "a", "b")
        super().__init__(disk, f"{what.name}, {layout}", SIZE, hosts)
        lock._STALE_S, lock._POLL_S = 0.02, 0.002  # a record that the power cut off is nobody's soon
        self.what, self.roots = what, roots
        self.judge = Judge(self.ground, roots)
        self.ranks = Ranks(disk, roots, self._when_failed)
        self._failures = [0] * SIZE
        self.ground.place({"a": None, "b": None})
        for step in what.before:
            self.ranks.save(Saves("", (), step, what.best, keep=9), watched=False)
        self.start = self.ground.read()

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
