"""`partial-fc data pairs`: a verification set (.bin) from a list of pairs, or drawn from images."""

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from numpy.typing import NDArray

from partial_fc import terminal
from partial_fc.data import Source, open_source
from partial_fc.data.decode import encode_square
from partial_fc.data.pairs import write_pairs
from partial_fc.data.sample import naming, still
from partial_fc.files import check_new
from partial_fc.findings import counted
from partial_fc.flags.facts import PERCENT, PIXELS, In
from partial_fc.verbs.data.pair_list import mixed, read_pair_list


@dataclass(frozen=True)
class PairsOptions:
    """Writes a verification set in the layout of lfw.bin."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A list of pairs, one `path1 path2 0|1` a line (tabs or commas between them where paths hold blanks), or LFW's
    pairs.txt; or images to draw pairs from: a folder of class folders, or a folder with train.rec."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.bin")]
    """The .bin file to write."""
    root: Path | None = None
    """The folder that paths of a list are relative to; by default the list's own."""
    num_pairs: Annotated[int, In(1)] = 6000
    """Number of pairs to draw, half of them of one class. A list is used completely."""
    folds: Annotated[int, In(1)] = 10
    """Number of folds. No class occurs in two of them: a threshold is never tested on the classes it was chosen on."""
    seed: int = 0
    """Seed of the drawing."""
    image_size: Annotated[int | None, In(PIXELS)] = 112
    """Resize (shorter side, then the middle square), write as JPEG; none keeps the files as they are, and so does this
    size."""
    pad: bool = False
    """Add black bars to images that are not square (crops of 112 x 96), which lose rows or columns otherwise."""
    quality: Annotated[int, In(PERCENT)] = 95
    """JPEG quality of re-encoded images."""


def make_pairs(options: PairsOptions) -> None:
    """Writes options.output, which must not exist. Raises ValueError that names the faulty line, file or fold."""
    check_new(options.output)
    if options.source.is_file() and options.source.suffix != ".rec":
        listed = read_pair_list(options.source, options.root)
        files, same = listed.images, listed.same_N
        # Lists repeat images; each file is read once.
        numbers = terminal.bar(range(len(files)), desc="pairs", unit="image")
        content = [_encoded(files.read_file(number), files, number, options) for number in numbers]
        images = [content[image] for image in np.stack((listed.first_N, listed.second_N), axis=1).ravel()]
    else:
        source = open_source(options.source)
        label_N = source.labels()
        assert label_N is not None  # opened without a number of classes, it has counted them
        pair_P2, same = draw_pairs(label_N, options.num_pairs, options.folds, options.seed)
        indices = terminal.bar(pair_P2.ravel().tolist(), desc="pairs", unit="image")
        images = [_encoded(still(source.read(index)), source, index, options) for index in indices]
    write_pairs(options.output, images, same.tolist())
    print(f"{options.output}: {counted(len(same), 'pair')}, {int(same.sum())} of them of one class")


def draw_pairs(
    label_N: NDArray[np.int64], num_pairs: int, folds: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns (indices (P, 2), same (P,)): by fold, pairs of one class and of two in turn, so that any other number of
    folds has both kinds, too. No pair repeats.

    Classes are assigned to the folds at random; within a fold each class gives equally many pairs, if possible.
    """
    if folds < 1 or num_pairs < 1 or num_pairs % (2 * folds):
        raise ValueError(
            f"{num_pairs} pairs in {folds} folds, half of each of one class: expected a multiple of {2 * folds}"
        )
    rng = random.Random(seed)
    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(label_N.tolist()):
        members[label].append(index)
    classes = sorted(members)
    rng.shuffle(classes)

    def most(folds: int) -> int:
        """Returns how many pairs of each kind every fold can have."""
        return min(min(_possible([members[label] for label in classes[fold::folds]])) for fold in range(folds))

    half = num_pairs // (2 * folds)
    if (have := most(folds)) < half:
        fits = next(((n, found) for n in range(folds, 0, -1) if (found := min(most(n), num_pairs // (2 * n)))), None)
        raise ValueError(
            f"{counted(len(classes), 'class')} in {counted(folds, 'fold')}: one of them has {have} pairs of one class "
            f"or of two, expected {half} of each; "
            + (f"--folds {fits[0]} --num-pairs {2 * fits[0] * fits[1]}, or more images" if fits else "give more images")
        )
    pairs: list[tuple[int, int]] = []
    for fold in range(folds):
        images = [members[label] for label in classes[fold::folds]]
        pairs += _same_class(images, half, rng)
        pairs += _two_classes(images, half, rng)
    order = mixed(same := np.tile(np.repeat([True, False], half), folds), folds)
    return np.array(pairs, np.int64)[order], same[order]


def _possible(images: list[list[int]]) -> tuple[int, int]:
    """Returns the number of pairs of one class, and of two."""
    sizes = np.array([len(of_class) for of_class in images], np.int64)
    return int((sizes * (sizes - 1) // 2).sum()), (int(sizes.sum()) ** 2 - int((sizes**2).sum())) // 2


def _same_class(images: list[list[int]], count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Draws pairs of one class."""
    possible_C = np.array([len(of_class) * (len(of_class) - 1) // 2 for of_class in images])
    wanted_C = np.zeros_like(possible_C)
    while wanted_C.sum() < count:
        left = np.flatnonzero(wanted_C < possible_C)
        wanted_C[left[: count - int(wanted_C.sum())]] += 1
    pairs = []
    for of_class, possible, wanted in zip(images, possible_C.tolist(), wanted_C.tolist(), strict=True):
        for pair in rng.sample(range(possible), wanted):
            # pair counts (1, 0), (2, 0), (2, 1), (3, 0) ...: row `second` starts at second (second - 1) / 2
            second = int((1 + np.sqrt(1 + 8 * pair)) / 2)
            pairs.append((of_class[second], of_class[pair - second * (second - 1) // 2]))
    return pairs


def _two_classes(images: list[list[int]], count: int, rng: random.Random) -> list[tuple[int, int]]:
    pairs: dict[tuple[int, int], None] = {}  # an ordered set
    while len(pairs) < count:
        first, second = (rng.choice(of_class) for of_class in rng.sample(images, 2))
        pairs[min(first, second), max(first, second)] = None
    return list(pairs)


def _encoded(image: bytes | NDArray[np.uint8], source: Source, index: int, options: PairsOptions) -> bytes:
    assert isinstance(image, bytes), "files and records give encoded images"
    with naming(source, index):
        return encode_square(image, options.image_size, options.quality, options.pad)
