"""Tar shards in webdataset's layout, `key.jpg` beside `key.cls` or `key.json`, with random access through an index.

`partial-fc data index` reads a shard once and writes SHARD.tar.index, beside the shard; for a URL, into this user's
cache, unless the server has it at URL.index. The index is little-endian:
    8 bytes "PFCTAR03" | four u64: size of the shard, N, M, largest label | N rows: u64 offset, u32 size, i32 label
    N rows of M further labels, where a .json has a list of them: i32, -1 where there are fewer

N samples.
"""

import json
import os
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from io import BufferedReader
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.image_folder import is_image_name
from partial_fc.data.labels import KEYS, in_rows, of_file, of_sample
from partial_fc.data.recordio import read_class_names
from partial_fc.data.sample import MAX_FILE_BYTES, BadRecord, Sample, Source, SourceRefused
from partial_fc.data.sets.ranges import LocalFile, Ranges, as_url, open_ranges
from partial_fc.file_kind import HEAD_BYTES, it_is
from partial_fc.files import check_regular, in_cache, replacing

_MAGIC = b"PFCTAR03"
_HEAD = struct.Struct("<8s4Q")
_ROW = np.dtype([("offset", "<u8"), ("size", "<u4"), ("label", "<i4")])
_BLOCK = 512  # of a tar; a file's header is the one before its content
_LABELLED = ("cls", "json")
_LABEL_BYTES = 1 << 20
_AT_ONCE = 1 << 18  # bytes; neighbouring images share a read while a shard is indexed


class TarSource(Source):
    """The images of one shard, a file or a URL. num_classes: by default the largest label + 1.

    Raises ValueError without an index, or if the shard has another size than its index says. The header before each
    image is compared when the image is read, so a shard that was changed in place is noticed.
    """

    def __init__(self, path: str | os.PathLike[str], num_classes: int | None = None, num_labels: int = 1) -> None:
        self._path, self.num_labels = Path(path), num_labels
        self._file = open_ranges(path)
        self.remote = as_url(path) is not None
        self._row_N, largest, more_NM = _read_index(self._path, self._file)
        label_N = self._label_N = self._row_N["label"]  # with several labels (N, K)
        if num_labels > 1:
            label_N = self._label_N = of_file(np.column_stack((label_N, more_NM)), self)
        if more_NM.size:
            largest = int(label_N.max())
        self.num_classes = num_classes or largest + 1
        if largest >= self.num_classes:
            row = int(label_N.reshape(len(label_N), -1).max(axis=1).argmax())
            raise ValueError(f"{self.where(row)}: label {largest}; expected less than the {self.num_classes} classes")

    def __len__(self) -> int:
        return len(self._row_N)

    def read(self, index: int) -> Sample:
        offset, size, label = self._row_N[index].item()
        more: tuple[int, ...] = ()
        if self.num_labels > 1:
            label, more = of_sample(self._label_N[index], self, index)
        content = self._file.pread(offset - _BLOCK, _BLOCK + size)
        is_header = content[257:262] == b"ustar" and re.fullmatch(rb"[\0 ]*0*%o[\0 ]*" % size, content[124:136])
        if not is_header or len(content) != _BLOCK + size:
            kind = SourceRefused if self.remote else BadRecord  # of a server it may be another one's answer
            raise kind(
                f"{self.where(index)}: no file of {size} bytes starts here; the shard has changed since it was "
                f"indexed: partial-fc data index {self._file.name}"
            )
        return Sample(content[_BLOCK:], label, index, more)

    def where(self, index: int) -> str:
        return f"{self._file.name}, offset {self._row_N['offset'][index]}"

    def key(self, index: int) -> str:
        return str(self._row_N["offset"][index])

    def will_need(self, indices: Sequence[int]) -> None:
        if isinstance(self._file, LocalFile):
            for offset, size, _ in self._row_N[list(indices)].tolist():
                self._file.will_need(offset - _BLOCK, _BLOCK + size)

    def layout(self) -> Iterator[NDArray[Any]]:
        yield from (self._row_N, self._label_N)

    def labels(self) -> NDArray[np.int64]:
        return self._label_N.astype(np.int64)

    def class_names(self) -> list[str] | None:
        """Returns the names in classes.txt beside the shard, or None."""
        return None if self.remote else read_class_names(self._path, self.num_classes)

    def close(self) -> None:
        self._file.close()


def write_tar_index(path: str | os.PathLike[str], picture: str | None = None) -> tuple[Path, int]:
    """Writes the index of a shard: (its path, number of samples). picture: what follows a sample's name, `left` or
    `left.png`, where it has several pictures. Raises ValueError for a damaged or truncated shard, an image without a
    label, a label without an image, and two images, with the offset."""
    with closing(open_ranges(path)) as file:
        more: list[int] = []
        count_N: list[int] = []  # of further labels

        def described() -> Iterator[tuple[int, int, int]]:
            for offset, size, labels in _samples(file, picture):
                more.extend(labels[1:])
                count_N.append(len(labels) - 1)
                yield offset, size, labels[0]

        rows = np.fromiter(described(), _ROW)
        if not len(rows):
            raise ValueError(f"{file.name} has no images; expected key.jpg (or .png ...) beside key.cls or key.json")
        index = _index_path(Path(path), file)
        with replacing(index, durable=True, shared=True) as partial, partial.open("wb") as out:
            largest = max(int(rows["label"].max()), max(more, default=0))
            out.write(_HEAD.pack(_MAGIC, file.size, len(rows), max(count_N), largest))
            rows.tofile(out)
            if more:
                in_rows(np.array(more), np.array(count_N)).astype("<i4").tofile(out)
    return index, len(rows)


def _index_path(path: Path, file: Ranges) -> Path:
    """Returns the path of an index: beside the shard, or in the cache, under a name that changes with the size."""
    if url := as_url(path):
        return in_cache("tar-index", f"{zlib.crc32(f'{url} {file.size}'.encode()):08x}-{path.name}.index")
    return path.with_name(f"{path.name}.index")


def _read_index(path: Path, file: Ranges) -> tuple[NDArray[Any], int, NDArray[np.int32]]:
    """Maps a shard's index: (its rows, the largest label, further labels (N, M))."""
    index, remedy = _index_path(path, file), f"partial-fc data index {file.name}"
    why = ""
    if (url := as_url(path)) and not index.exists():
        try:
            with closing(open_ranges(f"{url}.index")) as beside, replacing(index, shared=True) as partial:
                partial.write_bytes(beside.pread(0, beside.size))
        except ValueError as error:
            why = f" ({error})"
    if not index.exists():
        raise ValueError(f"{index} not found{why}; it says where each image of {file.name} starts. Write it: {remedy}")
    check_regular(index)
    with index.open("rb") as stream:
        head = stream.read(_HEAD.size)
    magic, tar_bytes, num, width, largest = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0, 0)
    end = _HEAD.size + num * _ROW.itemsize
    if magic != _MAGIC or not num or index.stat().st_size != end + 4 * num * width or largest >= 2**31:
        raise ValueError(f"{index} is no index of a tar shard, or cut short. Write it again: {remedy}")
    row_N = np.memmap(index, _ROW, "r", _HEAD.size, (num,))
    if tar_bytes != file.size:
        lost = row_N["offset"] + row_N["size"] > file.size
        first = f"; the first image beyond its end is at offset {row_N['offset'][lost.argmax()]}" if lost.any() else ""
        raise ValueError(
            f"{file.name} has {file.size} bytes and had {tar_bytes} when it was indexed{first}: it is truncated, or "
            f"newer than its index. Copy it again, or write the index again: {remedy}"
        )
    more_NM = np.memmap(index, "<i4", "r", end, (num, width)) if width else np.zeros((num, 0), np.int32)
    return row_N, largest, more_NM


def _samples(file: Ranges, picture: str | None) -> Iterator[tuple[int, int, list[int]]]:
    """Yields (offset, size, labels) of each sample: consecutive files with the same name up to its first dot. A .cls
    counts, not the .json beside it."""
    for name, parts in groupby(_files(file), lambda part: part[0]):
        images, label = [], None
        for _, ending, offset, size, text in parts:
            if is_image_name(f"x.{ending}") and (picture is None or f"{ending}.".startswith(f"{picture.lower()}.")):
                images.append((offset, size, ending))
            elif ending == "cls" or (ending == "json" and not label):
                label = offset, ending, text
        if len(images) > 1:
            endings = [ending for *_, ending in images]
            raise ValueError(
                f"{file.name}, offset {images[1][0]}: {name} has several pictures, .{' and .'.join(endings)}; choose "
                f"one: partial-fc data index --picture {endings[0]} {file.name}"
            )
        if images and label:
            yield *images[0][:2], _labels(f"{file.name}, offset {label[0]}", *label[1:])
        elif images or label:
            offset, missing = (images[0][0], "key.cls or key.json") if images else (label[0], f"key.{picture or 'jpg'}")  # type: ignore[index]
            raise ValueError(f"{file.name}, offset {offset}: {name} has no {missing} beside it")


def _files(file: Ranges) -> Iterator[tuple[str, str, int, int, bytes]]:
    """Yields (name up to the first dot, ending, offset, size, content of a label) of the regular files of a tar, and
    closes it."""
    with closing(BufferedReader(file, _AT_ONCE)) as stream:
        at = 0
        try:
            with tarfile.open(fileobj=stream, mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # it would remember all
                    at, size = member.offset_data, member.size
                    if size > MAX_FILE_BYTES:
                        raise ValueError(f"{file.name}, offset {at}: a file of {size} bytes")
                    folder, slash, base = member.name.rpartition("/")
                    key, _, ending = base.lower().partition(".")
                    text = b""
                    if ending in _LABELLED:
                        stream.seek(at)
                        text = stream.read(min(size, _LABEL_BYTES))
                    if member.isreg():
                        yield f"{folder}{slash}{base[: len(key)]}", ending, at, size, text
                    at = tar.offset
        except tarfile.TarError as error:
            what = it_is(file.pread(0, HEAD_BYTES)) if at == 0 else "; the shard is truncated or damaged"
            raise ValueError(f"{file.name}, offset {at}: {error}{what}") from None
        # tarfile takes a damaged header for the end.
        if file.pread(at, _BLOCK) != bytes(_BLOCK):
            raise ValueError(f"{file.name}, offset {at}: no header of a file; the shard is truncated or damaged")


def _labels(where: str, ending: str, text: bytes) -> list[int]:
    try:
        value: Any = json.loads(text) if ending == "json" else int(text)
        if isinstance(value, dict):
            value = next((value[name] for name in KEYS if name in value), None)
    except (ValueError, RecursionError):
        value = None
    labels: list[Any] = value if isinstance(value, list) and ending == "json" else [value]
    if not labels or any(type(label) is not int or not 0 <= label < 2**31 for label in labels):
        keys = f" under {' or '.join(KEYS)}, or a list of such" if ending == "json" else ""
        raise ValueError(f"{where}: got {text[:80]!r}; expected a class number{keys}")
    return labels
