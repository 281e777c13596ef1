"""Recipe `mnist` in several processes: replicas, resuming. (A launch as users start it: test_preemption.py.)"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.classic.mnist_job import (
    GLOBAL_BATCH,
    NUM_TEST,
    assert_same_files,
    assert_same_weights,
    reference,
    train_here,
    train_several,
)
from tests.recipes.conftest import losses, result

OWING = f"--batch-size {GLOBAL_BATCH // 2} --momentum 0.9 --gradient-compression 2bit --compression-threshold 0.01"
HALVES = f"--batch-size {GLOBAL_BATCH // 2} --momentum 0.9 --precision fp16-o2"


def exact(num_ranks: int) -> str:
    return f"--precision fp64 --batch-size {GLOBAL_BATCH // num_ranks}"


@pytest.fixture(scope="module")
def three(digits, tmp_path_factory) -> Path:
    """What three processes leave behind: with a batch norm each, with one for all, and that within an epoch."""
    root = tmp_path_factory.mktemp("three")
    runs = [
        (root / "plain", exact(3), ""),
        (root / "shared", f"{exact(3)} --sync-bn", ""),
        (root / "moved", f"{exact(3)} --sync-bn --max-steps 10", ""),
    ]
    train_several(digits, runs, num_ranks=3)
    return root


@pytest.fixture(scope="module")
def two(digits, three, tmp_path_factory) -> Path:
    """What two processes leave behind; one of the runs of three is theirs from then on."""
    root = tmp_path_factory.mktemp("two")
    runs = [
        (three / "moved", f"{exact(2)} --sync-bn", ""),
        (root / "whole", OWING, ""),
        (root / "parts", f"{OWING} --max-steps 4", ""),
        (root / "parts", OWING, ""),
        (root / "halves", f"{HALVES} --max-steps 10", "bright@6"),
    ]
    printed = train_several(digits, runs, num_ranks=2)
    assert len(re.findall(r"^Training complete in: \d+:\d\d:\d\d\.\d{6}$", printed, re.M)) == len(runs)
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


def test_two_processes_go_on_in_the_midst_of_an_epoch_of_three(three, two):
    """The same images in the same steps, up to the last of the epoch, which repeats another number of them."""
    moved, shared = losses(three / "moved"), losses(three / "shared")
    assert len(moved) == len(shared) == 14
    assert moved[:10] == shared[:10]
    assert moved[10:13] == pytest.approx(shared[10:13], rel=1e-8)
    assert result(three / "moved")["world_size"] == 2


def test_two_processes_resume_and_agree_on_what_overflows(digits, two):
    whole, parts, halves = (two / name for name in ("whole", "parts", "halves"))

    # Interrupted and resumed, with what each rank has for itself: its batch norms, what its gradients still owe.
    assert losses(parts) == losses(whole)
    assert_same_files(whole, parts, 14)

    # In step 6 the numbers of rank 1 alone overflowed: nobody made that update (several.py compares the replicas).
    assert "step 6: a gradient overflowed" in (halves / "logs/rank-0000.log").read_text()
    found = result(halves)
    assert found["loss_scale"] == 2.0 ** (16 - found["skipped_updates"])
    weights = load_file(halves / "model.safetensors")
    assert all(t.isfinite().all() for t in weights.values())

    # One process takes over what two owed, with its own smaller steps: from the end of an epoch, and within one.
    train_here(digits, parts, f"{OWING} --epochs 3")
    assert result(parts)["steps"] == 14 + 13
    train_here(digits, halves, HALVES)
    assert result(halves)["steps"] == 10 + 7  # of the 79 images that are left, 12 each
