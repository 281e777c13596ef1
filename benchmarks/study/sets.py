"""The sets of the studies, from the fonts of this machine: same fonts and libraries, same bytes.

clean, small, large     training sets of glyphs, as `python -m demo glyphs` draws them
split, flipped          the same images as clean, with other labels
other                   characters that are in none of the others, large aside
heldout                 4,000 characters that no run sees in eight typefaces, and pairs of those that look alike
seen-SET                another drawing of each character of clean, small or large
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from demo.glyphs_fonts import CHINESE, NEVER_TRAINED, TYPEFACES, characters, choose, find_fonts
from demo.glyphs_pairs import choose_pairs, trained
from demo.glyphs_render import Pen, Runner, workers
from demo.make_glyphs import drawn_by, shapes, write_training
from partial_fc import counter_rng
from partial_fc.data.recordio import RecordReader, RecordWriter, pack

NUM_UNSEEN = 4000
# Classes before labels are changed. split: half of the classes are two by a coin for each image. flipped: two images of
# five have the label of another class.
CLASSES = {"clean": 12_000, "split": 12_000, "flipped": 12_000, "small": 4_000, "large": 34_694, "other": 4_000}
_PARTS = {"encoder": (CLASSES["small"], CLASSES["small"] + 1000),
          "other": (CLASSES["clean"], CLASSES["clean"] + CLASSES["other"])}  # fmt: skip
SEED = 20_261_127  # not the demo's: other characters are held out
IMAGES = 3  # of a character in a typeface
LOOKALIKES = 60_000
_DONE = "digest"  # holds the SHA-256 of what figures depend on; written last
Labels = NDArray[np.int64]


def folder(root: Path, name: str) -> Path:
    """Returns the folder of a set, which is built if it is not there."""

    def make(path: Path) -> None:
        if name in _RELABELLED:
            clean = folder(root, "clean")
            relabel(clean, path, _RELABELLED[name](rows(clean)[1], CLASSES["clean"]))
        else:
            # Look-alikes are ranked by float32 products, whose last bits, hence the pairs, depend on OpenBLAS's kernel.
            environment = {**os.environ, "OPENBLAS_CORETYPE": "Haswell"}
            command = [sys.executable, "-m", "benchmarks.study.sets", str(path.resolve()), name]
            if subprocess.run(command, cwd=Path(__file__).parents[2], env=environment).returncode:
                raise ValueError(f"{path}: drawing the set {name} failed; why stands above")

    return made(root / name, make)


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """Returns a folder, which `make` fills if it is not there."""
    if not (path / _DONE).exists():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        make(path)
        (path / _DONE).write_text(_digest(path) + "\n")
    return path


def digest(path: Path) -> str:
    return (path / _DONE).read_text().strip()


def typefaces_of_rows(path: Path) -> list[str]:
    """Returns the typeface of each image of a set that `write_training` has written."""
    return [name.split("/")[1].removesuffix("-0.jpg") for name in rows(path)[0]]


# ---- drawn


def draw(path: Path, name: str) -> None:
    fonts = find_fonts(Path("/usr/share/fonts"))
    typefaces = characters(fonts)
    pen = Pen(tuple((font.path, font.index) for font in fonts), 40, 90, SEED)
    with workers(0) as run:
        if name == "heldout":
            _, codes = choose(typefaces, 1, NUM_UNSEEN, SEED)
            drawn = drawn_by(pen, run, {code: CHINESE for code in codes})
            write_training(path, pen, run, drawn, 1)
            np.save(path / "lookalikes.npy", _lookalikes(pen, run, drawn))
            return
        of = name.removeprefix("seen-")
        first, stop = _PARTS.get(of) or (0, CLASSES[of])
        codes = choose(typefaces, stop, NUM_UNSEEN, SEED)[0][first:]
        drawn = drawn_by(pen, run, {code: trained(typefaces[code]) for code in codes})
        if name == of:
            write_training(path, pen, run, drawn, IMAGES)
            return
        # One image of each, in one of its typefaces, by a pen whose distortions no training image has.
        rng = np.random.default_rng((SEED, 1))
        one = {code: (int(rng.choice(faces)),) for code, faces in drawn.items()}
        write_training(path, Pen(pen.fonts, pen.size, pen.quality, SEED + 1), run, one, 1)


def _lookalikes(pen: Pen, run: Runner, drawn: dict[int, tuple[int, ...]]) -> NDArray[np.int64]:
    """Returns (row, row, is it one character) of held-out images, as lookalike.bin of `python -m demo glyphs` has."""
    image_of: dict[tuple[int, int], int] = {}
    for code, kept in drawn.items():
        for face in kept:
            image_of[code, face] = len(image_of)
    pairs = choose_pairs("lookalike", drawn, LOOKALIKES, SEED, shapes(pen, run, drawn))
    return np.array([
        (image_of[first.code, first.typeface], image_of[second.code, second.typeface], same)
        for first, second, same in pairs
    ], np.int64)  # fmt: skip


# ---- the same images under other labels


def split(label: Labels, num_classes: int) -> Labels:
    """Returns labels where every second class, by a keyed permutation, is two: a keyed coin for each image."""
    place = counter_rng.permute(torch.arange(num_classes), num_classes, counter_rng.derive_key(SEED, 2)).numpy()
    coin = counter_rng.hash32(torch.arange(len(label)) + counter_rng.derive_key(SEED, 3)).numpy() & 1
    half = num_classes // 2
    return np.where((place[label] < half) & (coin == 1), num_classes + place[label], label)


def flip(label: Labels, num_classes: int) -> Labels:
    """Returns labels of which two of five, by a keyed permutation, are another class, equally likely each."""
    place = counter_rng.permute(torch.arange(len(label)), len(label), counter_rng.derive_key(SEED, 4)).numpy()
    draw = counter_rng.hash32(torch.arange(len(label)) + counter_rng.derive_key(SEED, 5)).numpy()
    other = (label + 1 + draw % (num_classes - 1)) % num_classes
    return np.where(place < len(label) * 2 // 5, other, label)


_RELABELLED: dict[str, Callable[[Labels, int], Labels]] = {"split": split, "flipped": flip}


def rows(path: Path) -> tuple[list[str], Labels]:
    """Returns the description, CODE/TYPEFACE-NUMBER.jpg, and the label of each image that `write_training` wrote."""
    lines = [line.split("\t") for line in (path / "train.lst").read_text().splitlines()]
    return [name for _, name, _ in lines], np.array([int(label) for _, _, label in lines])


def relabel(source: Path, path: Path, label: Labels) -> None:
    """Writes the images of a set with other labels, without those of label -1. original.npy: if there are more classes
    than in the source, the class of the source that each is part of."""
    _, old = rows(source)
    reader, key = RecordReader(source / "train.rec"), 0
    with RecordWriter(path / "train.rec") as records:
        for number, new in enumerate(label.tolist(), start=1):
            if new >= 0:
                key += 1
                records.write(key, pack((new, 1.0), reader.read_sample(number)[1], id=key))
    num_classes = int(label.max()) + 1
    (path / "property").write_text(f"{num_classes},40,40\n")
    if num_classes > old.max() + 1:
        original = np.arange(num_classes)
        original[label[label >= 0]] = old[label >= 0]
        np.save(path / "original.npy", original)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix in (".rec", ".npy"):
            digest.update(json.dumps(file.name).encode())
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def never_trained() -> str:
    """Returns the typeface that no run sees."""
    return TYPEFACES[NEVER_TRAINED].name


if __name__ == "__main__":
    try:
        draw(Path(sys.argv[1]), sys.argv[2])
    except ValueError as error:
        sys.exit(f"{sys.argv[2]}: {error}")
