"""A folder that is given one content after the other."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.faults.disk.crash_states import Tree


class Ground:
    """Only what differs from what is there already is written, and nothing is looked at twice."""

    def __init__(self, folder: Path):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder = folder
        self._here: Tree = {}

    def place(self, tree: Mapping[str, bytes | None]) -> None:
        """Makes the folder's content this one."""
        for path in sorted(self._here, reverse=True):  # what lies in a folder before it
            if path not in tree or (self._here[path] is None) != (tree[path] is None):
                where = f"{self.folder}/{path}"
                if self._here.pop(path) is None:
                    os.rmdir(where)
                else:
                    os.unlink(where)
        for path in sorted(tree):
            content = tree[path]
            if path in self._here and self._here[path] == content:
                continue
            if content is None:
                os.mkdir(f"{self.folder}/{path}")
            else:
                with open(f"{self.folder}/{path}", "wb", buffering=0) as file:
                    file.write(content)
            self._here[path] = content

    def read(self) -> Tree:
        """What somebody else has made of it."""
        self._here = {}
        self._read("")
        return dict(self._here)

    def _read(self, below: str) -> None:
        with os.scandir(f"{self.folder}/{below}") as entries:
            for entry in entries:
                path = below + entry.name
                if entry.is_dir(follow_symlinks=False):
                    self._here[path] = None
                    self._read(f"{path}/")
                else:
                    with open(entry.path, "rb", buffering=0) as file:
                        self._here[path] = file.read()
