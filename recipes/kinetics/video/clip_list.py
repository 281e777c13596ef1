"""GluonCV's lists of videos, `path num_frames label` a line: a source, and a writer."""

import glob
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.sample import Sample, Source
from partial_fc.file_kind import TEXT, kind_of_file
from partial_fc.files import regular, replacing

from .frames import FrameFolder, VideoFile

_COLUMNS = "path num_frames label"
_MOST_DIGITS = 12


class ClipList(Source):
    """The videos of a list, with paths relative to data_dir: video files (".mp4" is added to a name without a dot; the
    list's number of frames is ignored), or folders of img_00001.jpg, ..., as many as the list says.

    Raises ValueError, with file and line, for a malformed line and for a label that is no class.
    """

    def __init__(self, list_file: str | os.PathLike[str], data_dir: str | os.PathLike[str], num_classes: int,
                 *, videos: bool) -> None:  # fmt: skip
        self.list_file, self.data_dir, self.videos = Path(list_file), Path(data_dir), videos
        self.num_classes = num_classes
        self.names: list[str] = []
        numbers = []
        if (kind := kind_of_file(list_file)) not in (TEXT, ""):
            raise ValueError(f"{list_file} is {kind}; expected a list of videos, `{_COLUMNS}` a line")
        with open(list_file, encoding="utf-8-sig", errors="surrogateescape", opener=regular) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    name, *values = self._parse(number, line)
                    self.names.append(name)
                    numbers.append(values)
        if not numbers:
            raise ValueError(f"{list_file} names no videos; expected lines of `{_COLUMNS}`")
        self._num_frames, self._labels = np.array(numbers, np.int64).T

    def _parse(self, number: int, line: str) -> tuple[str, int, int]:
        words, where = line.split(), f"{self.list_file}, line {number}"
        name, num_frames, label = (*words, "", "", "")[:3]
        are_counts = all(word.isdecimal() and len(word) <= _MOST_DIGITS for word in (num_frames, label))
        if not are_counts or (not self.videos and int(num_frames) < 1):
            count = f"{len(words)} columns, " if len(words) < 3 else ""
            raise ValueError(f"{where}: {count}{line.strip()[:200]!r}; expected `{_COLUMNS}`. {_why_not(words)}")
        if int(label) >= self.num_classes:
            raise ValueError(
                f"{where}: label {label}; expected 0 to {self.num_classes - 1} (--num-classes {self.num_classes})"
            )
        if self.videos and "." not in name.rpartition("/")[2]:
            name += ".mp4"
        return name, int(num_frames), int(label)

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> Sample:
        path = self.data_dir / self.names[index]
        frames = VideoFile(path) if self.videos else FrameFolder(path, int(self._num_frames[index]))
        return Sample(frames, int(self._labels[index]), index)

    def where(self, index: int) -> str:
        return str(self.data_dir / self.names[index])

    def labels(self) -> NDArray[np.int64]:
        return self._labels

    def layout(self) -> Iterator[NDArray[np.int64] | bytes]:
        yield self._labels
        yield from map(os.fsencode, self.names)

    def check_present(self, most: int) -> None:
        """Raises ValueError that names videos missing on this host; most: how many to check, spread over the list."""
        looked_at = np.unique(np.linspace(0, len(self) - 1, min(most, len(self))).astype(int)).tolist()
        there = os.path.isfile if self.videos else os.path.isdir
        if missing := [path for path in map(self.where, looked_at) if not there(path)]:
            what = "files" if self.videos else "folders of frames"
            raise ValueError(
                f"{socket.gethostname()}: of {len(looked_at):,} {what} of {self.list_file} that were looked for, "
                f"{len(missing):,} are not there, such as {', '.join(missing[:3])}; {self._why_missing(missing[0])}"
            )

    def _why_missing(self, path: str) -> str:
        stem, first = path.removesuffix(".mp4"), self.names[0].partition("/")[0]
        if not self.data_dir.is_dir():
            return f"--data-dir {self.data_dir} is no folder of this host"
        if self.videos and os.path.isdir(stem):
            return f"{stem} is a folder: leave out --video-loader for frames"
        if os.path.isfile(path) or os.path.isfile(f"{path}.mp4"):
            return "videos are there: give --video-loader"
        if first and first == self.data_dir.name:
            return f"the list's paths begin with {first}, where --data-dir ends: give --data-dir {self.data_dir.parent}"
        if others := sorted(Path(stem).parent.glob(f"{glob.escape(Path(stem).name)}.*")):
            return f"{others[0].name} is there: the list has to name its ending"
        return f"expected them below --data-dir {self.data_dir}, at the same path on every host"


def _why_not(words: list[str]) -> str:
    """Returns what is wrong with the words of a line."""
    if len(words) < 3 and any("," in word for word in words):
        return "Commas separate its columns; blanks have to"
    if len(words) == 2:
        return (
            "Path and label get the number of frames from `partial-fc data kinetics`; with --video-loader any number "
            "will do"
        )
    if len(words) > 3 and all(word.isdecimal() for word in words[-2:]):
        return "The path has a blank, which separates columns: rename it"
    return "Two whole numbers follow the path; there is at least one frame"


def write_list(path: Path, lines: Iterable[tuple[str, int, int]]) -> None:
    """Writes a list in GluonCV's format. Raises ValueError for a path with a blank, which separates columns."""
    with replacing(path) as part, part.open("w", encoding="utf-8", errors="surrogateescape") as file:
        for name, num_frames, label in lines:
            if len(name.split()) != 1:
                raise ValueError(f"{name!r} has a blank in it, which separates the columns of a list; rename it")
            file.write(f"{name} {num_frames} {label}\n")
