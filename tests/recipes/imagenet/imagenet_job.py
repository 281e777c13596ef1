"""What the tests of recipe `imagenet` run: a few small images, a small network."""

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recipes.imagenet import main as imagenet
from recipes.imagenet import resnet
from tests.running import Given, here, several

C, N, BATCH = 4, 22, 4  # classes; images, of which a second machine has as many; images of an update
UPDATES = 3  # of an epoch; its size, 14 images, is no multiple of BATCH
SMALL = (
    f"--num_labels {C} --image_size 32 --resize 36 --network resnet18 --batch_size {BATCH} --epoch_size 14 "
    "--num_epochs 2 --base_learning_rate 0.01 --num_workers 1 --use_cpu"
)
# resnet18 without the two stages that have 94 % of its 11 million parameters. (All of it: test_resnet.py.)
TWO_STAGES = resnet.BasicBlock, (2, 2)


def picture(number: int) -> np.ndarray:
    """RGB of another size each, its class to be seen."""
    noise = np.random.default_rng(number).integers(0, 128, (36 + number % 5, 40, 3), np.uint8)
    noise[:, :, number % 3] += np.uint8(40 * (number % C))
    return noise


def words(root: Path, data: object, flags: str) -> list[str]:
    """Of the command line; the CSV file is written to the working directory."""
    return shlex.split(f"{SMALL} --train_data {data} --models-root {root} {flags}")


def train_here(root: Path, data: object, flags: str = "") -> int:
    """In this process; the CSV file is written to `root`."""
    root.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(root):
        return here(__name__, words(root, data, flags))


def main(words: Sequence[str]) -> int:
    """The recipe, in a process of its own or under the fixture `two_stages`."""
    resnet.NETWORKS["resnet18"] = TWO_STAGES
    return imagenet.main(words)


def train_several(runs: list[tuple[Path, object, str]], num_ranks: int = 2) -> str:
    """One after the other, in one launch. Returns what it printed."""
    for root, _, _ in runs:
        root.mkdir(parents=True, exist_ok=True)
    given = [Given(__name__, words(*each), folder=str(each[0])) for each in runs]
    return several(given, num_ranks)
