"""A recipe that nobody wrote train/ for: what every recipe gets from the shared parts."""

import time
from pathlib import Path

import cv2
import numpy as np

from tests.recipes.conftest import losses, result
from tests.recipes.launch import forked, here
from tests.recipes.several import Given

RECIPE = "tests.recipes.throw_away"
STEPS = 8


def class_folders(folder: Path) -> Path:
    """Three classes of 10 noisy images of one brightness each."""
    rng = np.random.default_rng(0)
    for label in range(3):
        (folder / f"class-{label}").mkdir(parents=True)
        for number in range(10):
            image = np.clip(rng.normal(40 + 90 * label, 20, (16, 16, 3)), 0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / f"class-{label}" / f"{number}.png"), image)
    return folder


def words(data: Path, root: Path) -> list[str]:
    flags = f"--models-root {root} --max-steps {STEPS} --checkpoint-every 2 --verbose 0 --frequent 1"
    return ["--folder", str(data), *flags.split()]


def test_it_trains_is_killed_and_resumes(tmp_path):
    data = class_folders(tmp_path / "data")
    assert here(RECIPE, words(data, tmp_path / "whole")) == 0
    assert np.mean(losses(tmp_path / "whole")[-3:]) < losses(tmp_path / "whole")[0]

    killed = forked(Given(RECIPE, words(data, tmp_path / "killed")), tmp_path / "output")
    marker = tmp_path / "killed/checkpoints/step-00000002/COMPLETE"
    while not marker.exists():
        assert killed.is_alive(), (tmp_path / "output").read_text()
        time.sleep(0.005)
    killed.kill()
    killed.join()
    assert not (tmp_path / "killed/result.json").exists()

    assert here(RECIPE, words(data, tmp_path / "killed")) == 0
    assert "resumed from" in (tmp_path / "killed/logs/rank-0000.log").read_text()
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    one, other = (result(tmp_path / name) for name in ("whole", "killed"))
    assert one["evaluations"] == other["evaluations"]
    assert 0 < one["evaluations"]["train/accuracy"] <= 1
