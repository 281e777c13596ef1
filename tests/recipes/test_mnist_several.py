"""Recipe `mnist` in several processes: launchers, replicas, resuming."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.conftest import LAUNCHERS, losses, result, run
from tests.recipes.mnist_job import (
    GLOBAL_BATCH,
    NUM_TEST,
    assert_same_files,
    assert_same_weights,
    reference,
    train_here,
    train_several,
)

PLAIN = f"--precision fp32 --lr 0.05 --epochs 1 --batch-size {GLOBAL_BATCH // 2}"
OWING = f"--batch-size {GLOBAL_BATCH // 2} --momentum 0.9 --gradient-compression 2bit --compression-threshold 0.01"
HALVES = f"--batch-size {GLOBAL_BATCH // 2} --momentum 0.9 --precision fp16-o2"


@pytest.fixture(scope="module")
def two(digits, tmp_path_factory) -> Path:
    """What two processes leave behind, torchrun's."""
    root = tmp_path_factory.mktemp("two")
    runs = [
        (root / "torchrun", PLAIN),
        *exact_runs(root, 2),
        (root / "whole", OWING),
        (root / "parts", f"{OWING} --max-steps 4"),
        (root / "parts", OWING),
        (root / "halves", f"{HALVES} --max-steps 10"),
    ]
    train_several(digits, runs, num_ranks=2, OVERFLOW_AT="6")
    return root


def exact_runs(root: Path, num_ranks: int) -> list[tuple[Path, str]]:
    flags = f"--precision fp64 --batch-size {GLOBAL_BATCH // num_ranks}"
    return [(root / "plain", flags), (root / "shared", f"{flags} --sync-bn")]


def test_launchers_agree(digits, two, tmp_path):
    """Two processes with a batch norm each, fp32. (That the curve is the tutorial's is seen in fp64, below.)"""
    expected = losses(two / "torchrun")
    assert len(expected) == 7
    for name in ("horovodrun --gloo", "horovodrun --mpi", "--gpus 2"):
        root = tmp_path / name.replace(" ", "")
        words = f"--data-dir {digits} --models-root {root} {PLAIN} {'' if name in LAUNCHERS else name}"
        printed = run([*LAUNCHERS.get(name, []), sys.executable, "train.py", "mnist", *shlex.split(words)])
        assert len(re.findall(r"Training complete in: \d+:\d\d:\d\d\.\d{6}", printed)) == 1
        assert losses(root) == pytest.approx(expected, abs=1e-6), name
        assert result(root)["world_size"] == 2


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_several_processes_give_the_curve_of_one(digits, tmp_path, num_ranks, request):
    if num_ranks == 2:
        root = request.getfixturevalue("two")
    else:
        root = tmp_path
        train_several(digits, exact_runs(root, num_ranks), num_ranks)

    # As the tutorial has it, with a batch norm in each process.
    curve, weights = reference(digits, num_ranks, epochs=2, lr=0.05, dtype=torch.float64)
    assert losses(root / "plain") == pytest.approx(curve, rel=1e-8)
    assert_same_weights(root / "plain", weights, 1e-8)

    # With batch norm over all processes: one process, whole batch. (The last update of an epoch repeats images, as many
    # as the number of processes wants.)
    train_here(digits, tmp_path / "one", f"--sync-bn --precision fp64 --batch-size {GLOBAL_BATCH}")
    several, one = losses(root / "shared"), losses(tmp_path / "one")
    assert len(several) == len(one) == 14
    assert several[:6] == pytest.approx(one[:6], rel=1e-8)
    for name in ("plain", "shared"):
        assert np.sum(result(root / name)["confusion"]) == NUM_TEST


def test_two_processes_resume_and_agree_on_what_overflows(digits, two):
    whole, parts, halves = (two / name for name in ("whole", "parts", "halves"))

    # Interrupted and resumed, with what each rank has for itself: its batch norms, what its gradients still owe.
    assert losses(parts) == losses(whole)
    assert_same_files(whole, parts, 14)

    # In step 6 the numbers of rank 1 alone overflowed: nobody made that update (mnist_several compares the replicas).
    assert "step 6: the gradient overflowed, no update" in (halves / "logs/rank-0000.log").read_text()
    found = result(halves)
    assert found["loss_scale"] == 2.0 ** (16 - found["skipped_updates"])
    weights = load_file(halves / "model.safetensors")
    assert all(t.isfinite().all() for t in weights.values())

    # One process takes over what two owed, from the end of an epoch; within one, only two can finish it.
    train_here(digits, parts, f"{OWING} --epochs 3")
    assert result(parts)["steps"] == 14 + 13
    with pytest.raises(ValueError, match=r"in the midst of epoch 2, and this run's number of processes would"):
        train_here(digits, halves, HALVES)
