"""Recipe `mnist` in several processes: replicas, resuming. (A launch as users start it: test_preemption.py.)"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.recipes.classic.mnist_job import (
    GLOBAL_BATCH,
    NUM_TEST,
    assert_same_weights,
    reference,
    train_here,
    train_several,
)
from tests.recipes.conftest import losses, result


def exact(num_ranks: int) -> str:
    return f"--precision fp64 --batch-size {GLOBAL_BATCH // num_ranks}"


@pytest.fixture(scope="module")
def three(digits, tmp_path_factory) -> Path:
    """What three processes leave behind: with a batch norm each, with one for all, and that within an epoch."""
    root = tmp_path_factory.mktemp("three")
    runs = [
        (root / "plain", exact(3)),
        (root / "shared", f"{exact(3)} --sync-bn"),
        (root / "moved", f"{exact(3)} --sync-bn --max-steps 10"),
    ]
    train_several(digits, runs, num_ranks=3)
    return root


def test_several_processes_give_the_curve_of_one(digits, tmp_path, three):
    # As the tutorial has it, with a batch norm in each process.
    curve, weights = reference(digits, 3, epochs=2, lr=0.05, dtype=torch.float64)
    assert losses(three / "plain") == pytest.approx(curve, rel=1e-8)
    assert_same_weights(three / "plain", weights, 1e-8)

    # With batch norm over all processes: one process, whole batch. (The last update of an epoch repeats images, as many
    # as the number of processes wants.)
    train_here(digits, tmp_path / "one", f"--sync-bn --precision fp64 --batch-size {GLOBAL_BATCH}")
    several, one = losses(three / "shared"), losses(tmp_path / "one")
    assert len(several) == len(one) == 14
    assert several[:6] == pytest.approx(one[:6], rel=1e-8)
    for name in ("plain", "shared"):
        assert np.sum(result(three / name)["confusion"]) == NUM_TEST
        assert result(three / name)["world_size"] == 3


def test_two_processes_go_on_in_the_midst_of_an_epoch_of_three(digits, three):
    """The same images in the same steps, up to the last of the epoch, which repeats another number of them."""
    printed = train_several(digits, [(three / "moved", f"{exact(2)} --sync-bn")], num_ranks=2)
    assert len(re.findall(r"^Training complete in: \d+:\d\d:\d\d\.\d{6}$", printed, re.M)) == 1
    moved, shared = losses(three / "moved"), losses(three / "shared")
    assert len(moved) == len(shared) == 14
    assert moved[:10] == shared[:10]
    assert moved[10:13] == pytest.approx(shared[10:13], rel=1e-8)
    assert result(three / "moved")["world_size"] == 2
