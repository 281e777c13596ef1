"""One reader and a folder: reads what it is given under watch, among valid files."""

from pathlib import Path

from tests.faults.reader import Files, Reader
from tests.faults.watching import Fault, Watched, read_watched


class Trial:
    def __init__(self, reader: Reader, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.reader = reader
        self.folder = folder
        self.placed: Files = {}
        self.seeds = [files for files in reader.seeds() if reader.changed in files]
        for files in self.seeds:  # modules that are imported late, caches: not what is watched
            self._place(files)
            reader.read(folder)

    def read(self, data: bytes) -> Watched:
        """The others are those of the seed that has the most in common with data. Raises Fault, also
        where it costs too much twice: the first time others may have been at work, or a module been imported."""
        self._place(self.reader.completed({**self._nearest(data), self.reader.changed: data}))
        size = sum(map(len, self.placed.values()))
        try:
            return read_watched(self.reader.read, self.folder, size, self.reader.more_bytes)
        except Fault as fault:
            if fault.where not in ("all of it", "no line of ours") and "_TooLong" not in str(fault):
                raise
        self._place(dict(self.placed), anew=True)
        return read_watched(self.reader.read, self.folder, size, self.reader.more_bytes)

    def _nearest(self, data: bytes) -> Files:
        """By the bytes that are alike in the same places: a changed file mostly begins as it did."""
        return max(self.seeds, key=lambda files: _alike(files[self.reader.changed], data))

    def _place(self, files: Files, anew: bool = False) -> None:
        """Writes what is not there yet. anew: all."""
        for name in self.placed.keys() - files.keys():
            (self.folder / name).unlink()
        for name, content in files.items():
            if anew or self.placed.get(name) != content:
                (self.folder / name).write_bytes(content)
        self.placed = dict(files)


def _alike(a: bytes, b: bytes) -> int:
    return sum(x == y for x, y in zip(a[:512], b[:512], strict=False))
