"""What a disk may hold after its power failed: everything that was synced, and of the rest any part.

A model of a file system, fed with logged operations (operations.py). It promises as little as POSIX does:

    what is written to a file is there for certain once that file has been synced; before, each write may be missing,
    be there in part, or be there as zeros
    a name that a folder gets or loses is so for certain once that folder has been synced; before, each of these
    changes may be missing, whatever came before and after it; a rename within a folder happens whole or not at all
    a sync of a file that fails says nothing of what was written before: nor does a later one of that file
"""

import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.faults.disk import operations as op
from tests.faults.disk.operations import Operation

# Path -> content; of folders None. Paths as in the log, in order.
Tree = dict[str, bytes | None]
_HOW = ("missing", "half", "zeros")


@dataclass(eq=False, slots=True)
class _Write:
    """A change of a file's content. data None: it is cut to `offset` bytes."""

    offset: int
    data: bytes | None


@dataclass(eq=False, slots=True)
class _File:
    content: bytes  # for certain
    pending: list[_Write] = field(default_factory=list)
    doomed: list[_Write] = field(default_factory=list)  # of before a sync that failed: no later one is of use


@dataclass(eq=False, slots=True)
class _Folder:
    names: dict[str, "_File | _Folder"] = field(default_factory=dict)  # as programs see them
    certain: dict[str, "_File | _Folder"] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Naming:
    """Names that a folder gets (a file or folder) or loses (None), at once."""

    folder: _Folder
    changes: dict[str, "_File | _Folder | None"]


class Model:
    """A file system from a tree that is on the disk for certain, as operations change it."""

    def __init__(self, tree: Mapping[str, bytes | None]):
        self.root = _Folder()
        self.naming: list[_Naming] = []  # not certain yet, in order
        self._opened: dict[int, _File | _Folder] = {}
        self._stands: dict[int, int] = {}  # where an opened file stands
        for path, content in tree.items():
            folder, name = self._at(path)
            folder.names[name] = folder.certain[name] = _Folder() if content is None else _File(content)

    def _at(self, path: str) -> tuple[_Folder, str]:
        *above, name = path.split("/")
        folder = self.root
        for each in above:
            inner = folder.names[each]
            assert isinstance(inner, _Folder), path
            folder = inner
        return folder, name

    def _name(self, folder: _Folder, changes: dict[str, "_File | _Folder | None"]) -> None:
        for name, what in changes.items():
            if what is None:
                del folder.names[name]
            else:
                folder.names[name] = what
        self.naming.append(_Naming(folder, changes))

    def apply(self, operation: Operation) -> None:
        """One that failed changes nothing, but: a folder that is there already may be one that another rank has made
        whose part in the log is left out; a failed sync."""
        kind = operation.kind
        if kind == op.MKDIR and operation.result == -errno.EEXIST:
            folder, name = self._at(operation.path)
            if name not in folder.names:
                self._name(folder, {name: _Folder()})
        elif kind == op.SYNC and not operation.made:
            found = self._opened[operation.file]
            if isinstance(found, _File):
                found.doomed += found.pending
        elif operation.made:
            self._apply(kind, operation)

    def _apply(self, kind: str, operation: Operation) -> None:
        if kind == op.OPEN:
            self._open(operation)
        elif kind == op.WRITE:
            file, data = self._opened[operation.file], operation.data
            assert isinstance(file, _File)
            offset = operation.offset
            if offset < 0:
                offset = self._stands[operation.file]
                self._stands[operation.file] += len(data)
            file.pending.append(_Write(offset, data))
        elif kind == op.TRUNCATE:
            file = self._opened[operation.file]
            assert isinstance(file, _File)
            file.pending.append(_Write(operation.offset, None))
        elif kind == op.SYNC:
            self._sync(self._opened[operation.file])
        elif kind == op.MKDIR:
            folder, name = self._at(operation.path)
            self._name(folder, {name: _Folder()})
        elif kind in (op.UNLINK, op.RMDIR):
            folder, name = self._at(operation.path)
            self._name(folder, {name: None})
        elif kind == op.RENAME:
            (folder, name), (to, new) = self._at(operation.path), self._at(operation.other)
            assert folder is to, operation
            self._name(folder, {name: None, new: folder.names[name]})

    def _open(self, operation: Operation) -> None:
        if not operation.path:
            self._opened[operation.file] = self.root
            return
        folder, name = self._at(operation.path)
        if name not in folder.names and operation.flags & os.O_CREAT:
            self._name(folder, {name: _File(b"")})
        found = folder.names[name]
        if operation.flags & os.O_TRUNC and isinstance(found, _File):
            found.pending.append(_Write(0, None))
        self._opened[operation.file] = found
        size = len(_content(found, {})) if isinstance(found, _File) and operation.flags & os.O_APPEND else 0
        self._stands[operation.file] = size

    def _sync(self, what: "_File | _Folder") -> None:
        if isinstance(what, _Folder):
            what.certain = dict(what.names)
            self.naming = [naming for naming in self.naming if naming.folder is not what]
        elif not what.doomed:
            what.content, what.pending = _written(what.content, what.pending, {}), []

    # ---- what may be on the disk

    def whole(self) -> Tree:
        """As programs see it; so it is, too, when processes end and the machine does not."""
        return self._tree(self.naming, {})

    def states(self, count: int, chance: random.Random, host: str = "") -> Iterator[Tree]:
        """Some states: all that is pending is there, nothing is, names without contents, contents without names; some
        changes alone missing and alone there, and parts at random, `count` of each. host: the folder whose machine lost
        its power; "": all did."""
        top = self.root.names.get(host) if host else self.root
        if not isinstance(top, _Folder):
            return
        folders, writes = _below(top)
        mine = [each for each in self.naming if id(each.folder) in folders]
        others = [each for each in self.naming if id(each.folder) not in folders]
        # Of files that have no name any more, too: the loss of their names may be what is missing.
        nameless = [what for each in mine for what in each.changes.values() if isinstance(what, _File)]
        writes = list(dict.fromkeys([*writes, *(write for file in nameless for write in file.pending)]))
        yield self._tree(self.naming, {})
        if not mine and not writes:
            return
        missing = dict.fromkeys(writes, "missing")
        yield self._tree(others, missing)
        yield self._tree(self.naming, missing)
        yield self._tree(others, {})
        yield self._tree(self.naming, dict.fromkeys(writes, "zeros"))
        for each in chance.sample(mine, min(count, len(mine))):
            yield self._tree([other for other in self.naming if other is not each], {})
            yield self._tree([*others, each], {})
        for _ in range(count):
            share = chance.choice((0.2, 0.5, 0.8, 0.95))
            lost = {id(each) for each in mine if chance.random() > share}
            some = [each for each in self.naming if id(each) not in lost]
            yield self._tree(some, {write: chance.choice(_HOW) for write in writes if chance.random() > share})

    def _tree(self, naming: Sequence[_Naming], how: Mapping[_Write, str]) -> Tree:
        """naming: the changes of names that are there; how: writes that are not there whole."""
        names: dict[int, dict[str, _File | _Folder]] = {}
        for each in naming:
            entries = names.setdefault(id(each.folder), dict(each.folder.certain))
            for name, what in each.changes.items():
                if what is None:
                    entries.pop(name, None)
                else:
                    entries[name] = what
        tree: Tree = {}

        def walk(folder: _Folder, above: str) -> None:
            entries = names.get(id(folder), folder.certain)
            for name in sorted(entries):
                what = entries[name]
                if isinstance(what, _File):
                    tree[above + name] = _content(what, how)
                else:
                    tree[above + name] = None
                    walk(what, f"{above}{name}/")

        walk(self.root, "")
        return tree


def _below(top: _Folder) -> tuple[set[int], list[_Write]]:
    """The folders below one, by identity, and the writes to their files that are not certain."""
    folders, files = {id(top)}, dict[int, _File]()
    for what in (*top.names.values(), *top.certain.values()):
        if isinstance(what, _File):
            files[id(what)] = what
        elif id(what) not in folders:
            inner_folders, inner_writes = _below(what)
            folders |= inner_folders
            files[id(what)] = _File(b"", inner_writes)
    return folders, list(dict.fromkeys(write for file in files.values() for write in file.pending))


def _content(file: _File, how: Mapping[_Write, str]) -> bytes:
    return _written(file.content, file.pending, how) if file.pending else file.content


def _written(content: bytes, writes: Sequence[_Write], how: Mapping[_Write, str]) -> bytes:
    for write in writes:
        way = how.get(write)
        if way == "missing":
            continue
        if write.data is None:
            content = content[: write.offset].ljust(write.offset, b"\0")
            continue
        data = write.data
        if way == "half":
            data = data[: len(data) // 2]
        elif way == "zeros":
            data = bytes(len(data))
        content = content[: write.offset].ljust(write.offset, b"\0") + data + content[write.offset + len(data) :]
    return content


Cut = Callable[[], list[Operation]]
"""The operations that were made when it happened, in order: put together only where they are wanted."""


def cuts(log: Sequence[Operation]) -> Iterator[Cut]:
    """As they were logged, up to each of them; and each rank as far as that while the others had not moved since all of
    them met, or had come to their next meeting."""
    counts = [operation.changes or operation.kind == op.SYNC for operation in log]
    for end in (*(i for i in range(len(log)) if counts[i]), len(log)):
        yield partial(_some, log, end, end, lambda _: True)
    begin = 0
    for end in (*(i for i, operation in enumerate(log) if operation.kind == op.MEETING), len(log)):
        for at in range(begin, end):
            rank = log[at].rank
            if counts[at] and any(operation.rank != rank for operation in log[begin:end]):
                yield partial(_some, log, begin, at, rank.__eq__)
                yield partial(_some, log, at, end, rank.__ne__)
        begin = end + 1


def _some(log: Sequence[Operation], begin: int, end: int, of: Callable[[int], bool]) -> list[Operation]:
    """Up to `end`, from `begin` on only those of some ranks."""
    return [*log[:begin], *(operation for operation in log[begin:end] if of(operation.rank))]
