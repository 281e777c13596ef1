"""The flags of `partial-fc checkpoint`, without torch, so that help and mistakes cost no seconds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from partial_fc.flags.numbers import PROCESSES, check_numbers


@dataclass(frozen=True)
class InspectOptions:
    """Shows what a checkpoint holds; of a folder of checkpoints, which there are. Reads no more than it shows:
    `partial-fc checkpoint verify` tells whether the files are whole."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A checkpoint, a folder of checkpoints, or a run's --models-root."""
    json: bool = False
    """As JSON: a list with one object for each checkpoint."""


@dataclass(frozen=True)
class VerifyOptions:
    """Checks that a checkpoint is whole: every file there and as its checksum says, every class held once, shapes and
    dtypes in agreement. Exit status 1 where anything is wrong; each problem names its file."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """One checkpoint, or several folders of one, where each host has its own; or one folder of checkpoints, of which
    all are checked."""
    finite: bool = False
    """Also look for numbers that are not finite."""


@dataclass(frozen=True)
class MergeOptions:
    """One set of files, as one process would have written it. (Training needs none of this: any number of ranks loads
    what any other wrote.)"""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR...")]
    """A checkpoint, or a folder whose newest counts; several where each host has written into a folder of its own."""
    out: Path
    """The new checkpoint's folder; --resume takes it."""


@dataclass(frozen=True)
class ReshardOptions(MergeOptions):
    """The files that another number of ranks would have written, bit for bit the same rows: for hosts that each have
    a folder of their own, or to join those folders (with the number of ranks that they are from)."""

    world_size: int
    """Ranks that the new files are for."""

    def __post_init__(self) -> None:
        check_numbers(self, world_size=PROCESSES)


Names = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME...")]

Order = Literal["auto", "sorted", "append"]


@dataclass(frozen=True)
class ListOptions:
    """Prints number, name and last step of each class, tabs between them; - : no step has touched it."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """A checkpoint, or a folder whose newest counts."""


@dataclass(frozen=True)
class _NewOptions(ListOptions):
    out: Path
    """The new checkpoint's folder; --resume takes it."""


@dataclass(frozen=True)
class AddOptions(_NewOptions):
    """New classes. One with images starts at their mean direction, as the checkpoint's network sees them, with the
    length of trained centres; one without starts like any untrained class. All other rows stay as they are."""

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
class RemoveOptions(_NewOptions):
    """Classes go; the numbers of those after them move up."""

    names: Names = ()
    """Which."""
    names_file: Path | None = None
    """More of them, one a line."""


@dataclass(frozen=True)
class MergeClassesOptions(_NewOptions):
    """Several classes turn out to be one. It gets the mean of their directions, and keeps its own length and
    optimizer's state. (Its own direction alone would fit only its own images: they were trained apart.)"""

    into: str
    """The class that stays."""
    names: Names = ()
    """Those that become part of it."""
    images: tuple[float, ...] = ()
    """How many images each had, first that of --into, then the NAMEs: directions count by it. none: all alike, which
    is as good only where they had about as many."""

    def __post_init__(self) -> None:
        check_numbers(self, images="(0, 1e18)")


@dataclass(frozen=True)
class RenameOptions(_NewOptions):
    """Other names; nothing else changes."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="OLD=NEW...")] = ()
    """Which."""
    names_file: Path | None = None
    """More of them, one a line; or one NEW name for each class, by number."""


@dataclass(frozen=True)
class MatchOptions(_NewOptions):
    """Makes the classes those of a data set, in its order: new ones start from their images there, those that it lacks
    go."""

    data: Path
    """The data set that training will go on with; its classes have names."""
    max_bad_records: int = 0
    """Images that cannot be read are named and left out, at most so many."""
