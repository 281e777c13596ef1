"""What is told of a reader: valid files, and how they are read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.faults.mutations import Mutation

Files = dict[str, bytes]


@dataclass(frozen=True)
class Reader:
    """Of its files one is changed; the others stay valid, as they may have to be read first.

    changed: the name of that one. seeds: several sets of small valid files. read: of a folder that holds one; it must
    touch all that a user of the reader would. words, inside: see `mutate`. more_bytes: of memory, beside what any file
    may take (watching.py); None where the library behind it asks for what a file announces. completed: the files with
    what must fit to the changed one, such as its checksum. may_fail: some changes are errors.
    """

    name: str
    changed: str
    seeds: Callable[[], list[Files]]
    read: Callable[[Path], Any]
    words: tuple[bytes, ...] = ()
    inside: tuple[Mutation, ...] = ()
    more_bytes: int | None = 0
    may_fail: bool = True
    completed: Callable[[Files], Files] = lambda files: files


def written(write: Callable[[Path], Any]) -> Files:
    """The files that `write` makes in a folder."""
    with TemporaryDirectory() as folder:
        write(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
