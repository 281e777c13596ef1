"""Small sets of glyphs and digits."""

import fcntl
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from demo.make_glyphs import GlyphOptions, build
from tests.recipes.mnist.mnist_job import some_digits


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
