"""One reader and a folder: reads what it is given under watch, among valid files."""

from pathlib import Path

from tests.faults.reader import Files, Reader
from tests.faults.watching import read_watched


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

    def read(self, data: bytes) -> str:
        """The others are those of the seed that has the most in common with data. Returns "value" or the error's kind;
        raises Fault."""
        self._place({**self._nearest(data), self.reader.changed: data})
        more_bytes = self.reader.more_bytes
        return read_watched(self.reader.read, self.folder, more_bytes and more_bytes + 4 * len(data))

    def _nearest(self, data: bytes) -> Files:
        """By the bytes that are alike in the same places: a changed file mostly begins as it did."""
        return max(self.seeds, key=lambda files: _alike(files[self.reader.changed], data))

    def _place(self, files: Files) -> None:
        """Writes what is not there yet."""
        for name in self.placed.keys() - files.keys():
            (self.folder / name).unlink()
        for name, content in files.items():
            if self.placed.get(name) != content:
                (self.folder / name).write_bytes(content)
        self.placed = dict(files)


def _alike(a: bytes, b: bytes) -> int:
    return sum(x == y for x, y in zip(a[:512], b[:512], strict=False))
