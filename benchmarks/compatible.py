"""`python -m benchmarks.compatible demo/glyphs`: what --compatible-with gives, and costs.

For each seed: OLD, network tiny, 64 numbers, on every second character; NEW, network mini, 128 numbers, on all of them,
with OLD's centres beside its own; and the same network without them (free). All pairs of images of unseen characters:
error is 1 - TAR at FAR. Queries by the first model, gallery by the second.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from partial_fc.cli import call
from partial_fc.data import RecordSource
from partial_fc.data.pairs import read_pairs
from partial_fc.data.recordio import RecordWriter, pack

FAR = "tar@far=1e-4"


@dataclass(frozen=True)
class CompatibleOptions:
    """Trains and compares; prints a table."""

    glyphs: Annotated[Path, tyro.conf.Positional]
    """The set of `python -m demo glyphs`."""
    out: Path = Path("runs/compatible")
    """What is there is not trained again."""
    seeds: tuple[int, ...] = (0, 1, 2)
    weights: tuple[float, ...] = (1.0,)
    """Values of --compatible-weight; those after the first for the first seed alone."""
    epochs: float = 1.8
    at_once: int = 2
    """Runs beside each other, of one thread each."""


def write_set(folder: Path, samples: list[tuple[int, bytes]], names: list[str], size: int) -> Path:
    """Writes a set of (label, JPEG), with the names of its classes, once."""
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        partial.mkdir(parents=True)
        (partial / "property").write_text(f"{len(names)},{size},{size}\n")
        (partial / "classes.txt").write_text("".join(f"{name}\n" for name in names))
        with RecordWriter(partial / "train.rec") as records:
            for key, (label, content) in enumerate(samples):
                records.write(key, pack(label, content, key))
        partial.rename(folder)
    return folder


def write_sets(options: CompatibleOptions) -> tuple[Path, Path, Path]:
    """Returns all characters, every second one, and unseen ones."""
    source = RecordSource(options.glyphs)
    named = [line.split("\t")[1] for line in (options.glyphs / "classes.txt").read_text().splitlines()]
    samples = [(sample.label, bytes(sample.data)) for sample in map(source.read, range(len(source)))]
    whole = write_set(options.out / "all", samples, named, 40)
    half = [(label // 2, content) for label, content in samples if label % 2 == 0]
    images, _ = read_pairs(options.glyphs / "unseen.bin")
    rows = [line.split("\t") for line in (options.glyphs / "unseen.tsv").read_text().splitlines()]
    found = dict(zip(images, [row[i] for row in rows for i in (0, 2)], strict=True))
    unseen = sorted(set(found.values()))
    others = [(unseen.index(character), content) for content, character in found.items()]
    return (
        whole,
        write_set(options.out / "half", half, named[::2], 40),
        write_set(options.out / "unseen", others, unseen, 40),
    )


def run(*words: object) -> None:
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(map(str, words))}: {(done.stdout + done.stderr)[-3000:]}")


def train(root: Path, rec: Path, seed: int, epochs: float, *more: object) -> Path:
    if not (root / "result.json").exists():
        run("train.py", "face", "--dataset", "glyphs", "--rec", rec, "--models-root", root, "--seed", seed, "--epochs",
            epochs, "--batch-size", 48, "--check-data", "off", "--val-targets", *more)  # fmt: skip
    return root


def errors(model: Path, old: Path, unseen: Path) -> dict[str, float]:
    """Returns the error of each side."""
    out = model / f"against-{old.name}"
    if not (out / "evaluation.json").exists():
        run("-m", "partial_fc", "evaluate", model, "--all-pairs", unseen, "--against", old, "--out", out)
    found = json.loads((out / "evaluation.json").read_text())["against"]["sets"]["all pairs"]
    return {side: 1 - rates[FAR] for side, rates in found.items()}


def bench_compatible(options: CompatibleOptions) -> None:
    """Trains, and prints what each seed gives."""
    whole, half, unseen = write_sets(options)

    def one(seed: int) -> list[str]:
        root = options.out / f"seed-{seed}"
        old = train(root / "old", half, seed, options.epochs, "--network", "tiny", "--embedding-size", 64)
        free = errors(train(root / "free", whole, seed, options.epochs), old, unseen)
        lines = []
        for weight in options.weights if seed == options.seeds[0] else options.weights[:1]:
            more = "--compatible-with", old, "--compatible-weight", weight
            new = errors(train(root / f"new-{weight:g}", whole, seed, options.epochs, *more), old, unseen)
            each = new["old, old"], new["new, old"], new["new, new"], free["new, new"], free["new, old"]
            lines.append(f"| {seed} | {weight:g} | " + " | ".join(f"{error:.2%}" for error in each) + " |")
        return lines

    with ThreadPoolExecutor(options.at_once) as pool:
        tables = list(pool.map(one, options.seeds))
    print("| seed | weight | old in old | new in old | new in new | free in free | free in old |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    print("\n".join(line for lines in tables for line in lines))


if __name__ == "__main__":
    sys.exit(call(bench_compatible, sys.argv[1:], "python -m benchmarks.compatible"))
