"""The pairs of glyph images in the verification sets.

All three sets are of characters never trained on. Half of the pairs show one character twice, in each of the ten folds;
the two images of a pair always have different typefaces, so that the typeface is no cue. A character has one image in
each typeface, which stands in several pairs, as the photos of LFW and CFP do.
- unseen: any two of the trained typefaces; the second character is random.
- unseen_font: the first image is in the typeface never trained on, the second in a trained one.
- lookalike: as unseen, but the two characters of a pair are among each other's most similar ones.
In unseen and unseen_font no character is in two folds, as in LFW; a lookalike may come from another fold.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .glyphs_fonts import NEVER_TRAINED
from .glyphs_render import Glyph

FOLDS = 10
SETS = ("unseen", "unseen_font", "lookalike")
_ROWS = 512


class Pair(NamedTuple):
    first: Glyph
    second: Glyph
    same: bool


Typefaces = Mapping[int, tuple[int, ...]]


def choose_pairs(
    name: str, typefaces: Typefaces, num_pairs: int, seed: int, shape_NTP: NDArray[np.float32]
) -> list[Pair]:
    """Returns the pairs of one of SETS in file order: by fold, first the genuine pairs, then the impostors; a function
    of (name, seed, typefaces). typefaces: those that draw each held-out character. num_pairs: a multiple of 20."""
    rng = np.random.default_rng((seed, 1 + SETS.index(name)))
    codes = list(typefaces)
    if name == "unseen_font":
        codes = [code for code in codes if NEVER_TRAINED in typefaces[code]]
    half = num_pairs // 2
    same = [(codes[i], codes[i]) for i in _spread(half, len(codes))]
    if name == "lookalike":
        other = [(codes[a], codes[b]) for a, b in lookalikes(shape_NTP, half)]
        # Sorted by similarity: shuffled, so that all folds are equally hard.
        other = [other[i] for i in rng.permutation(half)]
    else:
        other = [(codes[a], codes[b]) for a, b in _random_others(half, len(codes), rng)]

    pairs = []
    for fold in range(FOLDS):
        part = slice(*_part_of_fold(fold, half))
        for first, second in same[part] + other[part]:
            faces = _two_typefaces(typefaces[first], typefaces[second], name == "unseen_font", rng)
            images = [Glyph(code, face, 1) for code, face in zip((first, second), faces, strict=True)]
            pairs.append(Pair(images[0], images[1], first == second))
    return pairs


def trained(typefaces: Sequence[int]) -> tuple[int, ...]:
    return tuple(face for face in typefaces if face != NEVER_TRAINED)


def lookalikes(shape_NTP: NDArray[np.float32], count: int) -> list[tuple[int, int]]:
    """Pairs each character with its nearest other one, then with its second nearest, ...; every pair (a, b) once.

    shape_NTP: N characters in T typefaces as P values of mean 0 and length 1 (0 where a typeface lacks one). The
    similarity of two characters is their drawings' mean correlation over the typefaces.
    """
    num, num_faces, _ = shape_NTP.shape
    if count > num * (num - 1) // 2:
        raise ValueError(f"{count} pairs of {num} characters asked for; there are {num * (num - 1) // 2}")
    flat = shape_NTP.reshape(num, -1) / num_faces**0.5
    # Every pair occurs at most twice, once from each side, so this many neighbours suffice.
    depth = min(num - 1, 2 * -(-count // num))
    nearest = np.empty((num, depth), np.int64)
    for start in range(0, num, _ROWS):
        similarity = flat[start : start + _ROWS] @ flat.T
        similarity[np.arange(len(similarity)), np.arange(start, start + len(similarity))] = -np.inf
        nearest[start : start + _ROWS] = np.argsort(-similarity, axis=1, kind="stable")[:, :depth]
    pairs: dict[tuple[int, int], None] = {}
    for rank in range(depth):
        for a in range(num):
            b = int(nearest[a, rank])
            if (b, a) not in pairs:
                pairs[a, b] = None
    return list(pairs)[:count]


def _part_of_fold(fold: int, num: int) -> tuple[int, int]:
    """Returns the half-open range of num items in a fold."""
    return fold * num // FOLDS, (fold + 1) * num // FOLDS


def _spread(count: int, num: int) -> Iterator[int]:
    """Yields count indices below num, by fold, each character of a fold about equally often."""
    each = count // FOLDS
    for fold in range(FOLDS):
        low, high = _part_of_fold(fold, num)
        yield from (low + i * (high - low) // each for i in range(each))


def _random_others(count: int, num: int, rng: np.random.Generator) -> Iterator[tuple[int, int]]:
    """Yields count different pairs; the second character is from the same fold."""
    seen = set()
    for i, a in enumerate(_spread(count, num)):
        low, high = _part_of_fold(i * FOLDS // count, num)
        b = a
        while a == b or frozenset((a, b)) in seen:
            b = int(rng.integers(low, high))
        seen.add(frozenset((a, b)))
        yield a, b


def _two_typefaces(
    first: tuple[int, ...], second: tuple[int, ...], unseen_font: bool, rng: np.random.Generator
) -> tuple[int, int]:
    a = NEVER_TRAINED if unseen_font else int(rng.choice(trained(first)))
    return a, int(rng.choice([face for face in trained(second) if face != a]))
