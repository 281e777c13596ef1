"""What the tests of recipe `imagenet` run. As a program it runs the recipe several times in one launch: `python -m
tests.recipes.imagenet_job "FLAGS" "FLAGS" ...`, under a launcher; starting processes takes longer than training."""

import contextlib
import os
import shlex
import sys
from pathlib import Path

import numpy as np

from partial_fc import comm
from partial_fc.train_command import exit_now
from recipes import imagenet
from tests.recipes.conftest import run, torchrun

C, N, BATCH = 4, 22, 4  # classes; images, of which a second machine has as many; images of an update
UPDATES = 3  # of an epoch; its size, 14 images, is no multiple of BATCH
SMALL = (
    f"--num_labels {C} --image_size 32 --resize 36 --network resnet18 --batch_size {BATCH} --epoch_size 14 "
    "--num_epochs 2 --base_learning_rate 0.01 --num_workers 1 --use_cpu"
)


def picture(number: int) -> np.ndarray:
    """RGB of another size each, its class to be seen."""
    noise = np.random.default_rng(number).integers(0, 128, (36 + number % 5, 40, 3), np.uint8)
    noise[:, :, number % 3] += np.uint8(40 * (number % C))
    return noise


def train_here(root: Path, data: object, flags: str = "") -> int:
    """In this process, which saves the seconds that torch takes to be imported; the CSV file is written to `root`."""
    root.mkdir(parents=True, exist_ok=True)
    words = f"{SMALL} --train_data {data} --models-root {root} {flags}"
    with contextlib.chdir(root):
        return imagenet.main(shlex.split(words))


def train_several(runs: list[tuple[Path, object, str]], num_ranks: int = 2) -> str:
    """One after the other, in one launch. Returns what it printed."""
    words = [shlex.join([str(root), str(data), flags]) for root, data, flags in runs]
    return run([*torchrun(num_ranks), sys.executable, "-m", "tests.recipes.imagenet_job", *words])


def main(runs: list[str]) -> None:
    world = comm.init("cpu")
    end = world.close
    world.close = lambda: None  # type: ignore[method-assign]
    comm.init = lambda *_, **__: world
    for words in runs:
        root, data, flags = shlex.split(words)
        try:
            assert train_here(Path(root), data, flags) == 0
        except FloatingPointError as error:
            print(f"rank {world.rank} ends with: {error}", flush=True)
    end()


if __name__ == "__main__":
    main(sys.argv[1:])
    os.chdir("/")
    exit_now(0)
