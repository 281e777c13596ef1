"""MNIST's idx files, compressed or not (http://yann.lecun.com/exdb/mnist).

A file is a big-endian header and then bytes: 0x00000803, N, rows, columns for images; 0x00000801, N for labels. There
are four, `train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and the same with t10k for the test set, each perhaps
with `.gz`; the first two bytes, not the name, tell whether a file is compressed.

N images, H rows, W columns.
"""

import gzip
import io
import math
import struct
import zlib
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partial_fc.data.sample import Sample, Source
from partial_fc.file_kind import it_is
from partial_fc.files import read_bytes

Split = Literal["train", "t10k"]

_KINDS = {0x00000803: "images", 0x00000801: "labels"}
_GZIP = b"\x1f\x8b"
_MOST_BYTES = 4 << 30


class ImageSet(NamedTuple):
    """Images and labels. image_NHW: uint8, 0 is black. label_N: int64, in [0, num_classes)."""

    image_NHW: NDArray[np.uint8]
    label_N: NDArray[np.int64]


def is_idx_folder(path: Path) -> bool:
    """Tells whether it is a folder with such files, of its own or in its MNIST/raw (torchvision's layout)."""
    return path.is_dir() and any(chain(path.glob("*-idx[13]-ubyte*"), path.glob("MNIST/raw/*-idx[13]-ubyte*")))


def read_set(folder: Path, split: Split, num_classes: int = 10) -> ImageSet:
    """Reads one set of a folder, from the folder itself or its MNIST/raw (torchvision's layout). Raises ValueError,
    which names the file, if one is missing, damaged, of the other kind, or does not match the other."""
    images_path, labels_path = find(folder, split)
    image_NHW = read_idx(images_path, "images")
    label_N = read_idx(labels_path, "labels").astype(np.int64)
    if len(image_NHW) != len(label_N):
        raise ValueError(
            f"{images_path} has {len(image_NHW)} images but {labels_path} {len(label_N)} labels; expected as many"
        )
    wrong = np.flatnonzero(label_N >= num_classes)
    if len(wrong):
        raise ValueError(
            f"{labels_path}: label {wrong[0]} (counted from 0) is {label_N[wrong[0]]}; expected 0 to {num_classes - 1}"
        )
    return ImageSet(image_NHW, label_N)


def find(folder: Path, split: Split) -> tuple[Path, Path]:
    """Returns the paths (images, labels) of a set. An uncompressed file comes before a compressed one."""
    folders = (folder, folder / "MNIST" / "raw")
    for folder in folders:
        images, labels = (_file(folder / name) for name in names(split))
        if images and labels:
            return images, labels
        if images or labels:
            missing = names(split)[1 if images else 0]
            raise ValueError(f"{folder} has {images or labels} but no {missing} or {missing}.gz beside it")
    raise ValueError(
        f"no MNIST files in {' or '.join(map(str, folders))}; expected {' and '.join(names(split))}, each "
        "perhaps with .gz. Nothing is downloaded: put them there, name their folder with --data-dir, or write a small "
        "set of real digits with `python -m demo digits --out DIR`"
    )


def names(split: Split) -> tuple[str, str]:
    """Returns the file names of a set's images and labels, without .gz."""
    return f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte"


def _file(path: Path) -> Path | None:
    kaggles = path.name.replace("-idx", ".idx")
    return next(filter(Path.is_file, (path, path.with_name(f"{path.name}.gz"), path.with_name(kaggles))), None)


def read_idx(path: Path, expect: Literal["images", "labels"]) -> NDArray[np.uint8]:
    """Reads uint8, (N, H, W) for images, (N,) for labels. Raises ValueError for any other file."""
    content = _content(path)
    magic, num_sizes = int.from_bytes(content[:4], "big"), 3 if expect == "images" else 1
    if _KINDS.get(magic) != expect:
        got = f"0x{content[:4].hex()}" + (f", {_KINDS[magic]}" if magic in _KINDS else it_is(content))
        wanted = f"an idx file that starts with 0x{0x800 + num_sizes:08x}"
        raise ValueError(f"{path}: expected {expect}, {wanted}; got {got}")
    header = 4 + 4 * num_sizes
    if len(content) < header:
        raise ValueError(f"{path}: ends after {len(content)} bytes, within its header of {header}; copy it again")
    shape = struct.unpack(f">{num_sizes}I", content[4:header])
    wanted_bytes, num_bytes, sizes = math.prod(shape), len(content) - header, " x ".join(map(str, shape))
    if num_bytes != wanted_bytes:
        raise ValueError(
            f"{path}: its header says {sizes} = {wanted_bytes} bytes, {num_bytes} follow; the file is "
            f"{'cut off' if num_bytes < wanted_bytes else 'too long'}: copy it again"
        )
    if not num_bytes:
        raise ValueError(f"{path}: its header says {sizes}: it holds no {expect}; expected one or more")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    content = read_bytes(path, _MOST_BYTES)
    if not content.startswith(_GZIP):
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            return file.read(_MOST_BYTES)  # a few bytes can decompress to terabytes
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path}: damaged or cut off ({error}); copy it again") from error


class IdxSource(Source):
    """A set of a folder as a source. Raises ValueError as `idx.read_set`."""

    def __init__(self, folder: Path, split: Split, num_classes: int = 10):
        self.image_NHW, self.label_N = read_set(folder, split, num_classes)
        self._where = f"{folder} ({split})"
        self.num_classes = num_classes

    def __len__(self) -> int:
        return len(self.label_N)

    def read(self, index: int) -> Sample:
        return Sample(self.image_NHW[index][..., None], int(self.label_N[index]), index)

    def where(self, index: int) -> str:
        return f"{self._where}, image {index}"

    def labels(self) -> NDArray:
        return self.label_N
