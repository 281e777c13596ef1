"""The command lines of `partial-fc checkpoint classes`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
Names = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...")]
Order = Literal["auto", "sorted", "append"]


@dataclass(frozen=True)
class ListOptions:
    """Prints number, name and last step of each class, tabs between them; - : no step has touched it."""

    folder: Folder
    """A checkpoint, or a folder whose newest counts."""


@dataclass(frozen=True)
class AddOptions:
    """New classes. One with images starts at their mean direction, as the checkpoint's network sees them, with the
    length of trained centres; one without starts like any untrained class. All other rows stay as they are."""

    folder: Folder
    """A checkpoint, or a folder whose newest counts."""
    out: Path
    """The new checkpoint's folder; --resume takes it."""
    names: Names = ()
    """NAME, NAME=FOLDER of its images, or NAME=FILE.npy with embeddings of it, (N, D)."""
    names_file: Path | None = None
    """More of them, one a line."""
    images: Path | None = None
    """A folder with a sub-folder of images for each new class, which gives its name."""
    order: Order = "auto"
    """Where new classes go: sorted by name, as a folder of class folders has them; or after all others. auto: sorted
    where the names are so far."""
    max_bad_records: int = 0
    """Images that cannot be read are named and left out, at most so many."""


@dataclass(frozen=True)
class RemoveOptions:
    """Classes go; the numbers of those after them move up."""

    folder: Folder
    """A checkpoint, or a folder whose newest counts."""
    out: Path
    """The new checkpoint's folder; --resume takes it."""
    names: Names = ()
    """Which."""
    names_file: Path | None = None
    """More of them, one a line."""


@dataclass(frozen=True)
class MergeClassesOptions:
    """Several classes turn out to be one. It gets the mean of their directions, and keeps its own length and
    optimiser's state. (Its own direction alone would fit only its own images: they were trained apart.)"""

    folder: Folder
    """A checkpoint, or a folder whose newest counts."""
    into: str
    """The class that stays."""
    out: Path
    """The new checkpoint's folder; --resume takes it."""
    names: Names = ()
    """Those that become part of it."""
    images: tuple[float, ...] = ()
    """How many images each had, first that of --into, then the NAMEs: directions count by it. none: all alike, which
    is as good only where they had about as many."""


@dataclass(frozen=True)
class RenameOptions:
    """Other names; nothing else changes."""

    folder: Folder
    """A checkpoint, or a folder whose newest counts."""
    out: Path
    """The new checkpoint's folder; --resume takes it."""
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="OLD=NEW...")] = ()
    """Which."""
    names_file: Path | None = None
    """More of them, one a line; or one NEW name for each class, by number."""


@dataclass(frozen=True)
class MatchOptions:
    """Makes the classes those of a data set, in its order: new ones start from their images there, those that it lacks
    go."""

    folder: Folder
    """A checkpoint, or a folder whose newest counts."""
    data: Path
    """The data set that training will go on with; its classes have names."""
    out: Path
    """The new checkpoint's folder; --resume takes it."""
    max_bad_records: int = 0
    """Images that cannot be read are named and left out, at most so many."""
