"""A million classes from vectors on two cores: recipe `face` with --network none and linear (docs/vectors.md).

    python -m benchmarks.vectors DIR [--classes 1000000]

Makes clusters whose truth is known, trains on them, and prints a table. A class is a random direction of S numbers. A
vector of it is that direction with noise, and S numbers more that say nothing of the class, all turned by one random
rotation of 2 S dimensions: cosines of the vectors themselves are disturbed by the half that says nothing, and a linear
network can learn to leave it out. The best that it can do is known: the nearest of the true directions.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.nn.functional import normalize

_BLOCK = 65536  # classes at once


@dataclass(frozen=True)
class Options:
    """Makes DIR/train.npz and DIR/test.npz, trains on them, and prints a table."""

    folder: tyro.conf.Positional[Path]
    """Where the files (1.0 GB for a million classes) and runs are written."""
    classes: int = 1_000_000
    """Number of classes."""
    signal: int = 64
    """S, numbers that tell classes apart; the vectors have twice as many."""
    per_class: int = 4
    """Training vectors of each class."""
    test: int = 4096
    """Test vectors, of random classes."""
    noise: float = 0.1
    """Standard deviation of each of the S numbers; directions have length 1."""
    nuisance: float = 0.2
    """Standard deviation of each number that says nothing."""
    networks: tuple[str, ...] = ("none", "linear")
    """Networks to train."""
    flags: str = ""
    """More flags for the trainer."""


def main() -> None:
    options = tyro.cli(Options)
    options.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    truth_CS, turn = make(options)
    print(f"made in {time.perf_counter() - began:.0f} s", flush=True)
    test = dict(np.load(options.folder / "test.npz"))
    row_ND, label_N = torch.from_numpy(test["embeddings"]).float(), torch.from_numpy(test["labels"])
    best = rank_one((row_ND @ turn.T)[:, : options.signal], label_N, truth_CS)
    means = rank_one(row_ND, label_N, class_means(options))
    rows = [("the true directions, in the S numbers that count", best), ("means of each class's vectors", means)]
    print("| | rank-1 | rank-5 | minutes | vectors/s | peak memory |\n| --- | --- | --- | --- | --- | --- |")
    for name, rank1 in rows:
        print(f"| {name} | {rank1:.2%} | | | | |", flush=True)
    for network in options.networks:
        print(train(options, network), flush=True)


def make(options: Options) -> tuple[Tensor, Tensor]:
    """Writes both files; returns the true directions (C, S), and the rotation (2 S, 2 S) that undoes the files'."""
    size, width = options.signal, 2 * options.signal
    generator = torch.Generator().manual_seed(0)
    truth_CS = normalize(torch.randn(options.classes, size, generator=generator))
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]

    def vectors(label_N: Tensor) -> np.ndarray:
        row_ND = torch.randn(len(label_N), width, generator=generator)
        row_ND[:, :size] *= options.noise
        row_ND[:, :size] += truth_CS[label_N]
        row_ND[:, size:] *= options.nuisance
        return (row_ND @ turn).half().numpy()

    # By class: the loader draws them in random order.
    label_N = torch.arange(options.classes).repeat_interleave(options.per_class)
    row_ND = np.concatenate([vectors(part) for part in label_N.split(_BLOCK)])
    np.savez(options.folder / "train.npz", embeddings=row_ND, labels=label_N.numpy())
    label_N = torch.randint(options.classes, (options.test,), generator=generator)
    np.savez(options.folder / "test.npz", embeddings=vectors(label_N), labels=label_N.numpy())
    return truth_CS, turn


def class_means(options: Options) -> Tensor:
    row_ND = np.load(options.folder / "train.npz")["embeddings"]
    by_class = row_ND.reshape(options.classes, options.per_class, -1)
    return torch.cat([torch.from_numpy(by_class[i : i + _BLOCK]).float().mean(1)
                      for i in range(0, options.classes, _BLOCK)])  # fmt: skip


def rank_one(row_ND: Tensor, label_N: Tensor, centre_CD: Tensor) -> float:
    """The share of vectors whose nearest centre, by cosine, is that of their class."""
    best_N, found_N = torch.full((len(row_ND),), -torch.inf), torch.zeros(len(row_ND), dtype=torch.int64)
    for first in range(0, len(centre_CD), _BLOCK):
        cosine_N, at_N = (row_ND @ normalize(centre_CD[first : first + _BLOCK]).T).max(1)
        found_N = torch.where(cosine_N > best_N, at_N + first, found_N)
        best_N = torch.maximum(best_N, cosine_N)
    return (found_N == label_N).double().mean().item()


def train(options: Options, network: str) -> str:
    """Trains in one process on all cores; returns a row of the table."""
    root = options.folder / f"run-{network.replace(':', '-')}"
    embedding = "" if network == "none" else f"--embedding-size {options.signal}"
    words = (
        f"--rec {options.folder}/train.npz --val-targets test --network {network} {embedding} --models-root {root} "
        "--loss cosface --scale 32 --sample-rate 0.005 --batch-size 1024 --optimizer sgd --momentum 0 --lr 0.1 "
        "--head-lr 1 --lr-scaling none --lr-scheduler polynomial --epochs 2 --verbose 0 --checkpoint-every 0 "
    )
    command = [sys.executable, "train.py", "face", *shlex.split(words + options.flags)]
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))})
    found = json.loads((root / "result.json").read_text())
    rank1, rank5 = (found["evaluations"][f"test/{name}"] for name in ("rank1", "rank5"))
    return (
        f"| --network {network}, {found['steps']} steps | {rank1:.2%} | {rank5:.2%} | {found['seconds'] / 60:.1f} | "
        f"{found['vectors_per_s']:,.0f} | {found['peak_memory_bytes'] / 1e9:.1f} GB |"
    )


if __name__ == "__main__":
    main()
