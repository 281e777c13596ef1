"""Writing lists of videos, as GluonCV reads them: `path num_frames label` a line."""

from collections.abc import Iterable
from pathlib import Path

from partial_fc.files import replacing


def write_list(path: Path, lines: Iterable[tuple[str, int, int]]) -> None:
    """Raises ValueError for a path with a blank: the list's columns are separated by them."""
    with replacing(path) as part, part.open("w", encoding="utf-8", errors="surrogateescape") as file:
        for name, num_frames, label in lines:
            if len(name.split()) != 1:
                raise ValueError(f"{name!r} has a blank in it, which separates the columns of a list; rename it")
            file.write(f"{name} {num_frames} {label}\n")
