"""The names of classes, as people and data sets know them, for the class numbers of the head."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from partial_fc.checkpoint.read import Checkpoint
from partial_fc.files import read_text

if TYPE_CHECKING:
    from partial_fc.data import Source


def names_of(source: "Source", num_classes: int) -> list[str] | None:
    """Returns a name for each class of a head that learns from this source; None if the source has none. Classes beyond
    the source's are named by number. Characters that a line of UTF-8 cannot hold are escaped."""
    names = source.class_names()
    if names is None:
        return None
    return [_line(name) for name in names[:num_classes]] + [str(i) for i in range(len(names), num_classes)]


def _line(name: str) -> str:
    as_bytes = os.fsencode(name)  # a file's name need not be UTF-8
    return as_bytes.decode("utf-8", "backslashreplace").replace("\n", "\\n").replace("\r", "\\r")


def check_class_names(checkpoint: Checkpoint, source: "Source") -> list[str]:
    """Returns notes if class numbers may differ from the checkpoint's. Raises ValueError if they do."""
    stored, names = checkpoint.class_names, source.class_names()
    if stored is None and names is None:
        return []
    if stored is None or names is None:
        has, lacks = (checkpoint.folder, "the data set") if stored else ("the data set", checkpoint.folder)
        return [f"{has} has names for its classes, {lacks} has none: they cannot be compared"]
    now = names_of(source, max(len(stored), len(names)))
    assert now is not None
    if now == stored:
        return []
    number = next((i for i, (then, name) in enumerate(zip(stored, now, strict=False)) if then != name), len(stored))
    then = repr(stored[number]) if number < len(stored) else "not there"
    raise ValueError(
        f"{checkpoint.folder}: class {number} is {then}; it is {now[number]!r} in the data set, which has {len(names)} "
        f"classes, the checkpoint {len(stored)}. To make the checkpoint's classes those of the data: `partial-fc "
        f"checkpoint classes match {checkpoint.folder} --data DATA --out NEW`, then --resume NEW"
    )


def read_names(path: Path) -> list[str]:
    """Returns the names, one a line. Raises ValueError for an unreadable file."""
    try:
        lines = read_text(path).replace("\r\n", "\n").split("\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{error}; expected a name a line") from error
    return lines[:-1] if lines[-1] == "" else lines
