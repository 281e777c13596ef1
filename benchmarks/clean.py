"""`python -m benchmarks.clean`: what `partial-fc data clean` finds, and what training with its changes gives.

For each set of the study (docs/fidelity.md: split, flipped, clean) and each seed: a network is trained on it, the set
is cleaned by that network, and another one is trained with the changes, in as many steps. Errors are 1 - TAR at FAR
1e-5 over all pairs of images of 4,000 characters that no run has seen. The bounds in data/check/contradictions.py were
chosen on the sets other-split, other-flipped and other-joined, of 4,000 other characters: `--sets other-split ...`.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from partial_fc.cli import call
from partial_fc.comm import SingleWorld
from partial_fc.evaluate.all_pairs import all_pairs

from .study import measure, sets
from .study.cells import steps
from .study.run import GLYPHS, ROOT, Data, held_out, train

FAR = "1e-5"


@dataclass(frozen=True)
class CleanOptions:
    """Trains, cleans, trains again; prints a table."""

    folder: Path = ROOT / "runs/study"
    """What is there is not made again."""
    sets: tuple[str, ...] = ("clean", "split", "flipped")
    """Sets of the study, or other, other-split, other-flipped, other-joined."""
    seeds: tuple[int, ...] = (0, 1, 2)
    at_once: int = 2
    """Runs beside each other, of one thread each."""


def join(label: sets.Labels, num_classes: int) -> sets.Labels:
    """Returns labels where each two of the first half of the classes are one."""
    half = num_classes // 2
    return np.where(label < half, label // 2, label - half // 2)


RELABELLED = {"split": sets.split, "flipped": sets.flip, "joined": join}


def set_of(root: Path, name: str) -> tuple[Path, sets.Labels]:
    """Returns the folder of a set, and the true class of each image."""
    of, _, change = name.partition("-")
    source = sets.folder(root, of)
    truth_N = sets.rows(source if of == "other" else sets.folder(root, "clean"))[1]
    if not change:
        return source, truth_N
    relabelled = RELABELLED[change](truth_N, sets.CLASSES[of])
    return sets.made(root / name, lambda path: sets.relabel(source, path, relabelled)), truth_N


def trained(root: Path, kind: str, name: str, seed: int, *more: object) -> Path:
    folder = root / kind / f"{name}-{seed}"
    if not (folder / "result.json").exists():
        number = steps(sets.CLASSES["other" if name.startswith("other") else "clean"], 14)
        data = Data(str(set_of(root, name)[0]), None, number, GLYPHS, "")  # type: ignore[arg-type]  # not measured here
        train(folder, seed, data, " ".join(("--sample-rate 1", *map(str, more))), points=1)
    return folder


def cleaned(root: Path, name: str, seed: int) -> Path:
    out = root / "cleaned" / f"{name}-{seed}"
    if not (out / "index.html").exists():
        run = trained(root, "base", name, seed)
        words = [sys.executable, "-m", "partial_fc", "data", "clean", run, set_of(root, name)[0], "--out", out]
        subprocess.run([*map(str, words)], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    return out


def error(root: Path, run: Path) -> float:
    known = run / "error"
    if not known.exists():
        seen = held_out(root)
        images = [seen.images[i] for i in np.flatnonzero(seen.trained_N).tolist()]
        (checkpoint,) = run.glob("checkpoints/step-*")
        row_ND, label_N = measure.embed(checkpoint, images), seen.label_N[seen.trained_N]
        found = all_pairs(row_ND, label_N, SingleWorld(), torch.device("cpu"), name="pairs", rates=(FAR,))
        known.write_text(f"{1 - found.at_far[FAR].tar}\n")
    return float(known.read_text())


def found(table: Path, label_N: NDArray[np.int64], truth_N: NDArray[np.int64]) -> Iterator[str]:
    """Yields what a table of changes finds, and how much of it is right."""
    lines = [line.split("\t") for line in table.read_text().splitlines()[3:]]
    parts = label_N.max() > truth_N.max()  # some classes are several
    of_class = np.zeros(label_N.max() + 1, np.int64)
    of_class[label_N] = truth_N
    pairs = int((np.bincount(of_class[np.unique(label_N)]) - 1).clip(0).sum())
    merges = [
        parts and of_class[int(one)] == of_class[int(to)] for action, _, one, to, *_ in lines if action == "merge"
    ]
    images = [int(image) for action, image, *_ in lines if action in ("move", "drop")]
    wrong_N = (label_N != truth_N) & (label_N.max() == truth_N.max())
    moved = [truth_N[int(image)] == int(to) for action, image, _, to, *_ in lines if action == "move"]
    right = f" ({np.mean(merges):.4f} right, of {pairs:,})" if parts else ""
    yield f"{len(merges):,} merges{right}"
    if wrong_N.any():
        yield f"{len(images):,} images ({wrong_N[images].mean():.4f} right, of {wrong_N.sum():,})"
        yield f"{len(moved):,} moved ({np.mean(moved):.4f} right)"
    else:
        yield f"{len(images):,} images"
    splits = Counter(line[3] for line in lines if line[0] == "split")
    yield f"{len(splits):,} splits of {sum(splits.values()):,} images"
    touched = {int(line[1]) for line in lines if line[0] != "merge"}
    yield f"{len(touched) / len(label_N):.2%} of the images changed"


def bench_clean(options: CleanOptions) -> None:
    """Trains, and prints what each seed gives."""
    root = options.folder
    for name in options.sets:
        set_of(root, name)  # not by two jobs at once
    held_out(root)

    def one(job: tuple[int, str]) -> str:
        seed, name = job
        folder, truth_N = set_of(root, name)
        base, out = trained(root, "base", name, seed), cleaned(root, name, seed)
        table = out / "changes.tsv"
        label_N = np.array([sample.label for sample in map(measure.open_source(folder).read, range(len(truth_N)))])
        said = "; ".join(found(table, label_N, truth_N))
        errors = error(root, base), error(root, trained(root, "again", name, seed, "--apply", table))
        line = f"| {name} | {seed} | {errors[0]:.4f} | {errors[1]:.4f} | {errors[1] / errors[0]:.3f} | {said} |"
        print(line, flush=True)
        return line

    with ThreadPoolExecutor(options.at_once) as pool:
        lines = list(pool.map(one, product(options.seeds, options.sets)))
    print("\n| set | seed | error before | after | ratio | changes |\n| --- | --- | --- | --- | --- | --- |")
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    sys.exit(call(bench_clean, sys.argv[1:], "python -m benchmarks.clean"))
