"""`partial-fc data check`: what is wrong with a training set, before a training run finds out."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from numpy.typing import NDArray
from tqdm import tqdm

from partial_fc.data import open_source
from partial_fc.data.decode import decode
from partial_fc.data.sample import BadRecord, Source, naming

_SHOWN = 10
_CHUNK = 4096


@dataclass(frozen=True)
class CheckOptions:
    """Checks index, headers, labels and images of a training set; exit status 1 if any cannot be used."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A .rec folder, a folder with one sub-folder per class, or a list."""
    num_classes: int | None = None
    """What the training will be told; what the set itself says if not given."""
    images: bool = True
    """Decode every image and look for equal files; without it only index and labels are checked."""
    num_workers: int = 4
    """Threads that decode."""


def check(options: CheckOptions) -> int:
    """Prints the findings; returns the exit status: 1 if any would make training fail or skip samples."""
    source = open_source(options.source, options.num_classes)
    label_N = source.labels()
    count_C = np.bincount(label_N[label_N >= 0], minlength=source.num_classes)
    print(f"{options.source}: {len(source)} images, {source.num_classes} classes")
    outside = np.flatnonzero((label_N < 0) | (label_N >= source.num_classes)).tolist()
    _list(
        "labels outside [0, num_classes)",
        [f"{source.where(i)}: {label_N[i]}" for i in outside[:_SHOWN]],
        len(outside),
    )
    count_C = count_C[: source.num_classes]
    for number, what in ((0, "classes without images"), (1, "classes with one image")):
        labels = np.flatnonzero(count_C == number).tolist()
        _list(what, [str(label) for label in labels[:_SHOWN]], len(labels))
    if not options.images:
        return int(bool(outside))
    bad, hash_N = _decode_all(source, options.num_workers)
    _list("images that cannot be used", bad[:_SHOWN], len(bad))
    _report_equal(source, hash_N, label_N)
    return int(bool(outside or bad))


def _decode_all(source: Source, num_workers: int) -> tuple[list[str], NDArray[np.uint64]]:
    """(what is wrong with each bad image, a hash of each image file: 0 where bad)."""
    bad: list[str] = []
    hash_N = np.zeros(len(source), np.uint64)

    def look(index: int) -> str | None:
        try:
            image = source.read(index).image
            assert isinstance(image, bytes), "files and records give encoded images"
            with naming(source, index):
                decode(image)
        except BadRecord as error:
            return str(error)
        hash_N[index] = int.from_bytes(hashlib.blake2b(image, digest_size=8).digest(), "little")
        return None

    with ThreadPoolExecutor(num_workers) as pool, tqdm(total=len(source), unit="image") as bar:
        for start in range(0, len(source), _CHUNK):
            indices = range(start, min(start + _CHUNK, len(source)))
            bad += [message for message in pool.map(look, indices) if message is not None]
            bar.update(len(indices))
    return bad, hash_N


def _report_equal(source: Source, hash_N: NDArray[np.uint64], label_N: NDArray[np.int64]) -> None:
    """Files that occur twice: harmless in one class, contradictory labels in two."""
    order = np.argsort(hash_N, kind="stable")
    order = order[hash_N[order] != 0]
    equal = np.flatnonzero(hash_N[order[1:]] == hash_N[order[:-1]])
    pairs = np.stack((order[equal], order[equal + 1]), axis=1)
    differ = pairs[label_N[pairs[:, 0]] != label_N[pairs[:, 1]]].tolist()
    _list("image files that repeat another of their class", [], len(pairs) - len(differ))
    shown = [
        f"{source.where(a)} (class {label_N[a]}) = {source.where(b)} (class {label_N[b]})"
        for a, b in differ[:_SHOWN]
    ]
    _list("image files that repeat one of another class", shown, len(differ))


def _list(what: str, first: list[str], count: int) -> None:
    print(f"{what}: {count}")
    for line in first:
        print(f"  {line}")
    if first and count > len(first):
        print(f"  ... and {count - len(first)} more")
