"""What has to hold of folders of checkpoints: none that counts is ever bad, and a whole one always stays."""

from collections.abc import Sequence
from pathlib import Path

from partial_fc.checkpoint.folders import MARKER, folder_name, step_of
from partial_fc.verbs.checkpoint.verify import findings
from tests.faults.disk.crash_states import Tree
from tests.faults.disk.ground import Ground


class Wrong(AssertionError):
    """Something that must never be."""


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
        for kind, text in findings(paths):
            if kind == "bad" or (len(folders) == len(self._roots) and "others' were not checked" in text):
                raise Wrong(f"{', '.join(map(str, paths))} counts, but: {text}")
        self._whole.add(folders)
