"""Small glyph sets and a way to start the trainer as a user does."""

import fcntl
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest

from demo.make_glyphs import GlyphOptions, build
from partial_fc.verbs.report.page import page
from partial_fc.verbs.report.run_facts import read_run

if TYPE_CHECKING:
    from tests.recipes.several import Given

ROOT = Path(__file__).parents[2]

# The demo, shrunk: seconds instead of minutes, fp32 so that launchers can be compared.
SMALL = shlex.split(
    "--backbone tiny --embedding-size 32 --scale 16 --loss combined --margins 1 0 0.2 --optimizer adamw "
    "--weight-decay 0.05 --lr 0.003 --lr-scaling none --lr-scheduler cosine --warmup-epochs 0 --warmup-steps 2 "
    "--num-workers 1 --precision fp32 --frequent 10 --verbose 0 --checkpoint-every 0"
)

# A file with a network of one's own, FILE.py:make. Of few layers: a compiler takes 40 to 90 s for `tiny`.
ENCODER = """
from torch import nn

def make(embedding_size, image_size):
    layers = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.PReLU(8), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8 * (image_size // 2) ** 2, embedding_size))
"""


def reported(root: Path) -> bool:
    """Whether the report of a finished run has all of its sections."""
    text = page(read_run(root))
    wanted = (
        "finished, step",
        "learning rate",
        "Evaluations",
        "What the network sees",
        "Where the time",
        "<h2>Versions",
    )
    return all(words in text for words in wanted)


LAUNCHERS = {
    "horovodrun --gloo": ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"],
    "horovodrun --mpi": ["horovodrun", "--mpi", "-np", "2", "-H", "localhost:2"],
    "torchrun": ["torchrun", "--standalone", "--nproc_per_node=2", "--no-python"],
}


@pytest.fixture(scope="session")
def glyphs(tmp_path_factory) -> Path:
    """80 classes in seven typefaces, and verification sets of 600 pairs. Drawn once for all of pytest's processes."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / "glyphs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(GlyphOptions(root / "glyphs", num_classes=80, images_per_typeface=2, num_unseen=200, pairs=600, jobs=1))
    return root / "glyphs"


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """Some of scikit-learn's, as MNIST's files."""
    from tests.recipes.mnist.mnist_job import some_digits  # which needs this file

    return some_digits(tmp_path_factory.mktemp("mnist"))


def class_folders(folder: Path) -> Path:
    """Three classes of 10 noisy images of one brightness each."""
    rng = np.random.default_rng(0)
    for label in range(3):
        (folder / f"class-{label}").mkdir(parents=True)
        for number in range(10):
            image = np.clip(rng.normal(40 + 90 * label, 20, (16, 16, 3)), 0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / f"class-{label}" / f"{number}.png"), image)
    return folder


def environment() -> dict[str, str]:
    scripts = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


def run(command: list[str], expect: int = 0) -> str:
    """Runs to the end and returns what it printed; fails, showing that, where the exit status is another."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    ended_well = done.returncode == 0
    assert ended_well == (expect == 0), f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout


def train_here(models_root: Path, flags: str) -> str:
    """Recipe `face` with the small settings, in this process; flags, split like a shell's words, come last and win.
    Returns its log."""
    from tests.recipes.launch import here

    assert here("recipes.face.main", ["--models-root", str(models_root), *SMALL, *shlex.split(flags)]) == 0
    return (models_root / "logs/rank-0000.log").read_text()


def face(models_root: Path, flags: str, faults: str = "") -> "Given":
    """The same, to be run in one launch with others."""
    from tests.recipes.several import Given

    return Given("recipes.face.main", ["--models-root", str(models_root), *SMALL, *shlex.split(flags)], faults)


def train_several(runs: dict[Path, str], num_ranks: int = 2) -> str:
    """Recipe `face` for each folder with its flags, one after the other, in one launch. Returns what was printed."""
    from tests.recipes.launch import endings, several

    printed = several([face(root, flags) for root, flags in runs.items()], num_ranks)
    assert endings(printed, 0) == ["0"] * len(runs), printed[-6000:]
    return printed


def losses(models_root: Path) -> list[float]:
    """The loss of every step, from loss.csv; the steps must be 1, 2, 3, ..."""
    rows = [line.split(",") for line in (models_root / "loss.csv").read_text().splitlines()[1:]]
    assert [int(step) for step, _, _ in rows] == list(range(1, len(rows) + 1))
    return [float(loss) for _, loss, _ in rows]


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Of a checkpoint, and its checksum."""
    path = folder / "manifest.json"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    after = hashlib.sha256(path.read_bytes()).hexdigest()
    for sums in folder.glob("*.sha256"):
        sums.write_text(sums.read_text().replace(before, after))


def same_tensors(one: Path, other: Path) -> int:
    """The number of files of tensors that two folders have. AssertionError: they differ, in any byte."""
    names, others = (sorted(path.name for path in folder.glob("*.safetensors")) for folder in (one, other))
    assert names == others
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), f"{other / name} is another one"
    return len(names)


def result(models_root: Path) -> dict:
    return json.loads((models_root / "result.json").read_text())
