"""Disks in memory: what the product does with paths, descriptors and `os`, done to a dictionary.

Each operation takes simulated time, fails while the disk fails, and waits or fails on a host that does not reach it.
"""

import errno
import io
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from stat import S_IFDIR, S_IFREG
from types import SimpleNamespace
from typing import Any

from tests.simulation.clock import Clock


class File:
    """What a name and descriptors mean: it lives on without its name."""

    def __init__(self) -> None:
        self.data = bytearray()


class Disk:
    """A folder that all hosts see."""

    def __init__(self, clock: Clock, reaches: Callable[[], bool], waits: bool):
        """reaches: whether the host of whoever asks reaches it. waits: what it does where not; else it fails."""
        self.clock = clock
        self._reaches, self._waits = reaches, waits
        self.files: dict[str, File] = {}
        self.folders = {"/"}
        self.most_s = 0.004  # of an operation
        self.failing: int = 0  # an errno, while it does
        self.descriptors: dict[int, tuple[str, File | None]] = {}
        self._numbers = itertools.count(100)

    def operation(self, path: object, writes: bool = False) -> str:
        """Before each: raises OSError where it cannot be."""
        self.clock.point(most_s=self.most_s)
        while not self._reaches():
            if not self._waits:
                raise OSError(errno.EIO, "the server does not answer", str(path))
            self.clock.sleep(0.5)
        if self.failing and (writes or self.failing == errno.EIO):
            raise OSError(self.failing, os.strerror(self.failing), str(path))
        return str(path)

    def find(self, path: object) -> File:
        name = self.operation(path)
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return self.files[name]

    def create(self, path: object, flags: int = 0) -> File:
        name = self.operation(path, writes=True)
        if os.path.dirname(name) not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        if name in self.files and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "File exists", name)
        return self.files.setdefault(name, File())

    def names(self, path: object) -> list[str]:
        name = self.operation(path)
        if name not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        before = name.rstrip("/") + "/"
        return sorted(
            each[len(before) :]
            for each in (*self.files, *self.folders)
            if each.startswith(before) and each != before and "/" not in each[len(before) :]
        )


class Path(PurePosixPath):
    """A path on `Path.disk`."""

    disk: Disk

    def exists(self) -> bool:
        name = self.disk.operation(self)
        return name in self.disk.files or name in self.disk.folders

    def is_dir(self) -> bool:
        return self.disk.operation(self) in self.disk.folders

    def resolve(self) -> "Path":  # (there are no links)
        return self

    def stat(self) -> SimpleNamespace:
        size = 0 if self.is_dir() else len(self.disk.find(self).data)
        return SimpleNamespace(st_size=size, st_dev=0, st_ino=zlib.crc32(str(self).encode()))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        name = self.disk.operation(self, writes=True)
        if name in self.disk.folders and not exist_ok:
            raise FileExistsError(errno.EEXIST, "File exists", name)
        self.disk.folders |= {name, *map(str, self.parents if parents else ())}

    def iterdir(self) -> Iterator["Path"]:
        return (self / name for name in self.disk.names(self))

    def glob(self, pattern: str) -> Iterator["Path"]:
        try:
            names = self.disk.names(self)
        except (FileNotFoundError, NotADirectoryError):  # as pathlib's
            names = []
        return (self / name for name in names if fnmatchcase(name, pattern))

    def unlink(self, missing_ok: bool = False) -> None:
        name = self.disk.operation(self, writes=self.disk.failing == errno.EIO)
        if self.disk.files.pop(name, None) is None and not missing_ok:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)

    def rmdir(self) -> None:
        self.disk.folders.discard(self.disk.operation(self))

    def open(self, mode: str = "r", buffering: int = -1) -> Any:
        return Raw(self, mode) if "w" in mode else io.BytesIO(self.read_bytes())

    def read_bytes(self) -> bytes:
        return bytes(self.disk.find(self).data)

    def read_text(self, errors: str = "strict") -> str:
        return self.read_bytes().decode(errors=errors)

    def rename(self, target: object) -> None:
        """Of a folder: with all that is in it."""
        name = self.disk.operation(self, writes=True)
        for path in [path for path in self.disk.files if path.startswith(f"{name}/")]:
            self.disk.files[f"{target}{path[len(name) :]}"] = self.disk.files.pop(path)
        self.disk.folders.discard(name)
        self.disk.folders.add(str(target))

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def write_bytes(self, data: bytes) -> None:
        with Raw(self, "w") as file:
            while data:
                data = data[file.write(data) :]


class Raw:
    """A file that is written to, as io.FileIO; of a path that is none of ours, /dev/null."""

    def __init__(self, path: Any, mode: str):
        self._path = path
        self._file = path.disk.create(path) if isinstance(path, Path) else File()
        if "w" in mode:
            self._file.data.clear()

    def write(self, data: bytes) -> int:
        """Half of it, now and then, as an operating system may."""
        if isinstance(self._path, Path):
            self._path.disk.operation(self._path, writes=True)
            if len(data) > 1 and self._path.disk.clock.random.random() < 0.02:
                data = data[: len(data) // 2]
        self._file.data += data
        return len(data)

    def truncate(self, size: int) -> None:
        if isinstance(self._path, Path):
            self._path.disk.operation(self._path)
        del self._file.data[size:]

    def close(self) -> None:
        pass

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def os_of(disk: Disk, getpid: Callable[[], int], kill: Callable[[int, int], None], environ: Any) -> SimpleNamespace:
    """The module `os`, as far as the product uses it on paths and processes."""

    def open_(path: object, flags: int, mode: int = 0) -> int:
        if flags & os.O_DIRECTORY:
            disk.operation(path)
            file = None
        else:
            file = disk.create(path, flags) if flags & os.O_CREAT else disk.find(path)
        number = next(disk._numbers)
        disk.descriptors[number] = str(path), file
        return number

    def pwrite(number: int, data: bytes, at: int) -> int:
        name, file = disk.descriptors[number]
        disk.operation(name, writes=True)
        assert file is not None
        file.data[at : at + len(data)] = data
        return len(data)

    def replace(old: object, new: object) -> None:
        disk.find(old)
        disk.files[str(new)] = disk.files.pop(str(old))

    def stat(path: object) -> SimpleNamespace:
        name = disk.operation(path)
        if name in disk.files:
            return SimpleNamespace(st_mode=S_IFREG | 0o644, st_size=len(disk.files[name].data))
        if name in disk.folders:
            return SimpleNamespace(st_mode=S_IFDIR | 0o755, st_size=0)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)

    def lexists(path: object) -> bool:
        name = disk.operation(path)
        return name in disk.files or name in disk.folders

    return SimpleNamespace(
        open=open_,
        path=SimpleNamespace(lexists=lexists),
        pwrite=pwrite,
        replace=replace,
        stat=stat,
        close=lambda number: disk.descriptors.pop(number, None),
        fsync=lambda number: disk.operation(disk.descriptors[number][0], writes=True),
        listdir=disk.names,
        access=lambda path, mode: str(path) in disk.folders or str(path) in disk.files,
        getpid=getpid,
        kill=kill,
        environ=environ,
        devnull=os.devnull,
        sched_getaffinity=lambda _: {0, 1},
        strerror=os.strerror,
        **{name: getattr(os, name) for name in ("O_RDONLY", "O_WRONLY", "O_CREAT", "O_EXCL", "O_DIRECTORY", "R_OK")},
    )


def rmtree(path: Path) -> None:
    """As shutil's: file by file."""
    for each in list(path.iterdir()):
        each.unlink()
    path.rmdir()
