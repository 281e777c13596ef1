"""`partial-fc data kinetics`: writes recipe kinetics' lists of a folder with a sub-folder per class."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from partial_fc.data.image_folder import write_names
from partial_fc.data.sample import BadRecord
from partial_fc.files import read_text
from partial_fc.findings import counted
from partial_fc.flags.facts import THREADS, In
from partial_fc.verbs.data.left_out import usable

from .video.clip_list import write_list
from .video.frames import VideoFile

_SUFFIXES = (".mp4", ".avi", ".mkv", ".webm", ".mov", ".m4v", ".mpg", ".ts")


@dataclass(frozen=True)
class ListOptions:
    """Writes OUT, `path num_frames label` a line, of FOLDER/CLASS/VIDEO, or of FOLDER/CLASS/VIDEO/img_00001.jpg, ...

    Labels are the places of the classes in sorted order, as Kinetics' are. Each video is opened, and its first frame
    decoded."""

    folder: Annotated[Path, tyro.conf.Positional]
    out: Annotated[Path, tyro.conf.Positional]
    """The list, such as kinetics400_train_list_videos.txt. Beside it, with the ending .classes, the names of the
    classes."""
    rawframes: bool = False
    """Each video is a folder of frames."""
    classes: Path | None = None
    """A file of class names, by label, where FOLDER may lack some: that of the training list, for the validation's."""
    max_bad_records: int = 0
    """Unreadable videos to report and skip before stopping."""
    num_workers: Annotated[int, In(THREADS)] = 4
    """Threads that read."""


def make_lists(options: ListOptions) -> None:
    """Writes the lists. Raises ValueError without videos, for an invalid name, or for too many unreadable videos."""
    names = _classes(options)
    videos = [(name, label) for label, c in enumerate(names) for name in _videos(options, c)]
    if not videos:
        kind = "folders of img_00001.jpg, ..." if options.rawframes else f"files with {', '.join(_SUFFIXES)}"
        raise ValueError(f"{options.folder}: no videos in its {counted(len(names), 'class')}; expected {kind} in them")
    count = _count_images if options.rawframes else _count_frames

    def look(video: tuple[str, int]) -> int:
        path = options.folder / video[0]
        try:
            return count(path)
        except BadRecord as error:
            raise BadRecord(f"{path}: {error}") from None

    counted_frames = usable(look, videos, options.num_workers, options.max_bad_records, "videos", "video")
    lines = [(name, num_frames, label) for (name, label), num_frames in counted_frames]
    write_list(options.out, lines)
    write_names(options.out.with_suffix(".classes"), names)
    print(f"{options.out}: {counted(len(lines), 'video')}; --num-classes {len(names)}")


def _classes(options: ListOptions) -> list[str]:
    here = sorted(entry.name for entry in os.scandir(options.folder) if entry.is_dir() and entry.name[0] != ".")
    if not here:
        raise ValueError(f"{options.folder}: no sub-folders; expected one for each class")
    if options.classes is None:
        return here
    names = read_text(options.classes, errors="surrogateescape").splitlines()
    if unknown := sorted(set(here) - set(names)):
        raise ValueError(f"{options.folder}: class {unknown[0]!r} is not in {options.classes}")
    return names


def _videos(options: ListOptions, name: str) -> Iterator[str]:
    folder = options.folder / name
    if not folder.is_dir():  # only in the file of classes
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir() if options.rawframes else entry.name.lower().endswith(_SUFFIXES):
            yield f"{name}/{entry.name}"


def _count_frames(path: Path) -> int:
    counts: list[int] = []

    def first(num_frames: int) -> list[int]:
        counts.append(num_frames)
        return [0]

    list(VideoFile(path).read(first))
    return counts[0]


def _count_images(path: Path) -> int:
    names = {name for name in os.listdir(path) if name.startswith("img_") and name.endswith(".jpg")}
    for number in range(1, len(names) + 1):
        if f"img_{number:05d}.jpg" not in names:
            raise BadRecord(f"{counted(len(names), 'image')} of a video, but no img_{number:05d}.jpg")
    if not names:
        raise BadRecord("no img_00001.jpg in it")
    return len(names)
