"""Recipe `mnist` as its users start it, in one process and in several, on some of scikit-learn's digits."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.mnist import apex
from recipes.mnist.main import parse
from tests.recipes.mnist.mnist_job import (
    GLOBAL_BATCH,
    NUM_TEST,
    assert_same_weights,
    reference,
    train_here,
    train_several,
)
from tests.running import losses, reported, result


def test_equals_the_tutorials_loop(digits, tmp_path):
    train_here(digits, tmp_path, "--precision fp64")
    curve, weights = reference(digits, 1, epochs=2, lr=0.05, dtype=torch.float64)
    assert losses(tmp_path) == pytest.approx(curve, rel=1e-8)
    assert_same_weights(tmp_path, weights, 1e-9)
    assert np.mean(curve[-5:]) < np.mean(curve[:5])
    train_here(digits, tmp_path / "fp32", "--max-steps 1")  # rounds once or twice in a few million
    assert losses(tmp_path / "fp32") == pytest.approx(curve[:1], rel=1e-6)


def test_what_is_printed_and_written(digits, tmp_path, capfd):
    train_here(digits, tmp_path, "--batch-size 1 --epochs 2 --lr 0.003")
    printed = capfd.readouterr().out.splitlines()
    steps = [line for line in printed if "Step" in line]
    curve = losses(tmp_path)
    assert steps == [
        f"Epoch [1/2], Step [100/151], Loss: {curve[99]:.4f}",
        f"Epoch [2/2], Step [100/151], Loss: {curve[250]:.4f}",
    ]
    found = result(tmp_path)
    accuracy = [line for line in printed if "accuracy" in line]
    assert len(accuracy) == 2
    correct = round(found["test_accuracy"] * NUM_TEST)
    assert accuracy[-1] == f"Epoch [2/2], Test accuracy: {correct / NUM_TEST:.2%} ({correct} of {NUM_TEST})".replace(
        "%", " %"
    )
    assert re.fullmatch(r"Training complete in: \d+:\d\d:\d\d\.\d{6}", printed[-1])
    assert found["steps"] == 302
    assert found["images_per_s"] > 0
    assert found["test_accuracy"] > 0.3
    assert np.trace(found["confusion"]) == correct
    (events,) = (tmp_path / "tensorboard").iterdir()
    for tag in (b"train/loss", b"time/data", b"time/backbone", b"speed/images_per_s", b"test/accuracy"):
        assert tag in events.read_bytes()
    assert (tmp_path / "logs" / "rank-0000.log").read_text().count(" rank 0 I Epoch [") == 4
    assert reported(tmp_path)


# ---- Apex's files


def test_apex_file_is_written_and_started_from(digits, tmp_path, capfd):
    flags = "--precision fp16-o2 --momentum 0.9"
    file = tmp_path / "amp_checkpoint.pt"
    train_here(digits, tmp_path / "first", f"{flags} --epochs 1 --save-amp {file}")
    found = apex.read(file)
    assert found.loss_scale == result(tmp_path / "first")["loss_scale"]
    manifest = json.loads((tmp_path / "first/checkpoints/step-00000007/manifest.json").read_text())
    assert found.unskipped == manifest["loss_scaler"]["clean_steps"] > 0
    train_here(digits, tmp_path / "second", f"{flags} --epochs 1 --load-amp {file}")
    printed = capfd.readouterr().out
    assert f"started from {file}" in printed

    # Its own checkpoint comes before the file; another run's file is refused by name.
    train_here(digits, tmp_path / "second", f"{flags} --epochs 2 --load-amp {file}")
    assert "is for a new run" in capfd.readouterr().out
    torch.save({"model": {}}, file)
    with pytest.raises(ValueError, match="expected Apex's three parts"):
        train_here(digits, tmp_path / "third", f"--load-amp {file}")


# ---- several processes


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


# ---- what is refused


def test_the_tutorials_command_line():
    config = parse(shlex.split("-n 2 -g 2 -nr 1 --epochs 5 --batch_size 64 --master-addr ip1"))
    assert (config.launch.nodes, config.launch.gpus, config.launch.nr) == (2, 2, 1)
    assert (config.schedule.epochs, config.optim.batch_size) == (5, 64)
    config = parse([])
    given = config.schedule.epochs, config.schedule.lr, config.optim.batch_size, config.mnist.n_workers
    assert given == (2, 1e-4, 100, 0)
