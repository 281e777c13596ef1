"""Recipe `face` as its users start it: the demo, shrunk."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from partial_fc.verbs import train as train_command
from tests.running import LAUNCHERS, SMALL, face, losses, result, run, several, train_here, train_several

CURVE = "--max-steps 10 --batch-size 16 --image-size 24 --val-targets"


@pytest.fixture(scope="module")
def launched(glyphs, tmp_path_factory) -> tuple[Path, str]:
    """A run of two processes as README starts it, and what it printed: horovodrun takes MPI by itself where it was
    built with it. (Other launchers, --gloo among them: tests/faults/signals, tests/cluster/test_two_hosts.py.)"""
    models_root = tmp_path_factory.mktemp("curve")
    words = f"--models-root {models_root} --dataset glyphs --rec {glyphs} {CURVE}"
    return models_root, run([*LAUNCHERS["horovodrun --mpi"], "bash", "config.sh", *SMALL, *shlex.split(words)])


@pytest.mark.long
def test_horovod_gives_the_curve_of_torch_distributed_in_fp32(glyphs, launched, tmp_path):
    models_root, _ = launched
    train_several({tmp_path: f"--dataset glyphs --rec {glyphs} {CURVE}"})
    assert len(losses(models_root)) == 10
    assert max(abs(a - b) for a, b in zip(losses(models_root), losses(tmp_path), strict=True)) < 1e-4


VIT = "--network vit_t --image-size 40 --optimizer adamw --lr 1e-3 --max-steps 3"


@pytest.mark.parametrize(("network", "num_steps"), [("", 10), pytest.param(VIT, 3, marks=pytest.mark.long)])
def test_two_processes_give_the_curve_of_one(glyphs, tmp_path, network, num_steps):
    """In fp64, where rounding does not hide it; with stochastic depth and masks, too."""
    flags = f"--dataset glyphs --rec {glyphs} {CURVE} --sync-bn --precision fp64 {network}"
    train_here(tmp_path / "one", flags + " --batch-size 16")
    train_several({tmp_path / "two": flags + " --batch-size 8"})
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == num_steps
    assert len(set(one)) == num_steps
    assert max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-7


def test_the_log_says_who_what_and_where_the_time_went(launched):
    models_root, printed = launched
    for text in (
        "rank 0 of 2 (horovod)",
        "partial-fc 0.",
        "  data: --rec ",
        "step 10/10 · loss ",
        "1,120 images; global batch 2 x 16 = 32",
        "the centres of 40 of 80 classes, 0 to 39",
    ):
        assert text in printed
    line = next(line for line in (models_root / "training.log").read_text().splitlines() if "step 10/10" in line)
    for text in ("epoch 0.29", "Global Step: 10 ", "data", "backbone", "head", "communication"):
        assert text in line
    ended = " ".join(printed.replace("[1,0]<stdout>:", "").split())  # a long path has broken its lines
    assert re.search(r"Training is over! \S+; next: `partial-fc report \S+`", ended)


def test_every_line_that_a_run_prints_fits_100_columns(glyphs, tmp_path):
    """Sampled, two ranks, evaluated, resumed, without what paths take."""
    flags = f"--dataset glyphs --rec {glyphs} --batch-size 8 --sample-rate 0.5 --head-catch-up none"
    printed = several([face(tmp_path / "run", f"{flags} --max-steps {steps} --lr 0.00{steps}") for steps in (3, 5)])
    lines = [re.sub(r"\S*/(?=\S)", "", line) for line in printed.splitlines()]
    assert {words for words in ("note: ", "unseen_font", "resumed from", "over!") if words not in printed} == set()
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.long
def test_learns_to_tell_unseen_characters_apart(glyphs, tmp_path):
    """Sampled negatives, bf16, two ranks: the losses fall, accuracy is far above chance (0.5)."""
    flags = "--max-steps 80 --batch-size 32 --sample-rate 0.5 --precision bf16 --verbose 80 --frequent 20"
    train_several({tmp_path: f"--dataset glyphs --rec {glyphs} {flags}"})
    curve = losses(tmp_path)
    assert np.mean(curve[-20:]) < 0.5 * np.mean(curve[:20])
    found = result(tmp_path)
    assert found["evaluations"]["unseen/accuracy"] > 0.8
    assert found["evaluations"]["unseen_font/accuracy"] > 0.7
    assert found["best"]["unseen"] >= found["evaluations"]["unseen/accuracy"]
    assert found["steps"] == 80
    assert found["world_size"] == 2
    assert found["images_per_s"] > 0
    assert found["peak_memory_bytes"] > 100 << 20
    for name in ("roc.png", "logs/rank-0001.log"):
        assert (tmp_path / name).stat().st_size > 0
    assert list((tmp_path / "tensorboard").iterdir())

    # What is delivered is what was evaluated and saved, with the running statistics of both ranks; a rank's own differ.
    folder = tmp_path / "checkpoints/step-00000080"
    delivered, saved = load_file(tmp_path / "model.safetensors"), load_file(folder / "backbone.safetensors")
    assert delivered.keys() == saved.keys()
    assert all(torch.equal(t, saved[name]) for name, t in delivered.items())
    local = load_file(folder / "rank-00000-of-00002.safetensors")
    means = [name for name in delivered if name.endswith("running_mean")]
    assert means
    assert not any(torch.equal(delivered[name], local[f"buffer/{name}"]) for name in means)


def test_a_million_classes_without_data(tmp_path):
    flags = "--dataset 100w --image-size 32 --sample-rate 0.01 --max-steps 3 --batch-size 4 --embedding-size 8"
    train_here(tmp_path, flags)
    assert result(tmp_path)["steps"] == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--rec nowhere", "nowhere not found"),
        ("--dataset 100w --loss combined", "--margins m1 m2 m3"),
        ("--dataset glyphs --rec GLYPHS --loss arcface", "add --margins None"),
        ("--dataset 100w --num-classes 3 --image-size 4", "image size 4 is too small"),
        ("--dataset glyphs --rec GLYPHS --val-targets lfw", "lfw.bin"),
        ("--dataset glyphs --rec GLYPHS --val-targets --num-classes 79", "names 80 classes"),
    ],
)
def test_mistakes_are_named_without_a_trace(glyphs, tmp_path, flags, message, capsys):
    words = flags.replace("GLYPHS", str(glyphs)).split()
    assert train_command.main(["face", "--models-root", str(tmp_path), *words], "train.py")
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in printed
    assert "Traceback" not in printed


def test_help_shows_the_values_of_a_preset(capsys):
    with pytest.raises(SystemExit):
        train_command.main(["face", "--dataset", "emore", "--help-all"], "train.py")
    assert "85742" in capsys.readouterr().out.replace(" ", "")
