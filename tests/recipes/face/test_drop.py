"""`partial-fc data drop`: what is dropped from a set with wrong labels, and training without it."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from partial_fc.comm import SingleWorld
from partial_fc.embedding.load import load
from partial_fc.verbs.data.drop import DropOptions, drop, main_cosines
from tests.running import train_here

C, D, EACH = 30, 16, 40
FLAGS = (
    "--loss cosface --margins None --scale 16 --network linear --embedding-size 16 --batch-size 32 --optimizer adamw "
    "--lr 0.02 --lr-scaling none --lr-scheduler constant --warmup-steps 0 --precision fp32 --verbose 0 --val-targets "
    "--check-data off --num-workers 1 "
)


def dropped(run, data, out, **flags) -> np.ndarray:
    drop(DropOptions(checkpoint=run, images=(data,), out=out, **flags), SingleWorld(), torch.device("cpu"))
    return np.load(out)


def test_wrong_labels_weigh_nothing(tmp_path, capsys):
    """Sub-centres gather them; the main one is that of most images. The weights are what --sample-weights takes."""
    rng = np.random.default_rng(0)
    truth_N = np.repeat(np.arange(C), EACH)
    wrong_N = rng.random(len(truth_N)) < 0.15
    label_N = np.where(wrong_N, (truth_N + rng.integers(1, C, len(truth_N))) % C, truth_N)
    row_ND = rng.normal(size=(C, D))[truth_N] + 0.4 * rng.normal(size=(len(truth_N), D))
    np.savez(tmp_path / "set.npz", embeddings=row_ND.astype(np.float32), labels=label_N)
    run, out = tmp_path / "run", tmp_path / "weights.npy"
    train_here(run, f"--rec {tmp_path}/set.npz {FLAGS} --sub-centres 3 --max-steps 300")
    weight_N = dropped(run, tmp_path / "set.npz", out)
    assert f"{(weight_N == 0).sum()} of 1,200 images" in capsys.readouterr().out
    assert (weight_N[wrong_N] == 0).mean() > 0.7
    assert (weight_N[~wrong_N] == 0).mean() < 0.01

    (part,) = (run / "checkpoints/step-00000300").glob("head-*-classes-*")
    centre_CKD = torch.nn.functional.normalize(load_file(part)["centres"].float(), dim=2)
    cosine_NK = np.einsum("nd,nkd->nk", load(run).embed(row_ND.astype(np.float32)), centre_CKD.numpy()[label_N])
    main_C = np.array([np.bincount(cosine_NK[label_N == c].argmax(axis=1), minlength=3).argmax() for c in range(C)])
    angle_N = np.rad2deg(np.arccos(cosine_NK[np.arange(len(label_N)), main_C[label_N]]))
    np.testing.assert_array_equal(dropped(run, tmp_path / "set.npz", out, angle=40.0) > 0, angle_N <= 40)
    train_here(tmp_path / "again", f"--rec {tmp_path}/set.npz {FLAGS} --sample-weights {out} --max-steps 3")


def test_what_cannot_be_judged_stays():
    """An unusable image has no cosine; a class without usable images keeps what it has."""
    cosine_NK = np.array([[0.1, 0.9], [0.2, 0.8], [0.7, 0.1], [np.nan, np.nan]], np.float32)
    found = main_cosines(cosine_NK, np.array([0, 0, 0, 2]))
    assert found[:3].tolist() == pytest.approx([0.9, 0.8, 0.1])
    assert np.isnan(found[3])


def test_classes_without_a_centre_are_told_and_another_set_is_refused(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name, classes in (("set", 4), ("other", 6)):
        label_N = np.repeat(np.arange(classes), 8)
        row_ND = rng.normal(size=(len(label_N), D)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", embeddings=row_ND, labels=label_N)
    train_here(tmp_path / "run", f"--rec {tmp_path}/set.npz {FLAGS} --max-steps 2")
    few = FLAGS.replace("--batch-size 32", "--batch-size 2 --sample-rate 0.01")
    train_here(tmp_path / "few", f"--rec {tmp_path}/set.npz {few} --max-steps 1")
    for run, told in (("run", False), ("few", True)):
        weight_N = dropped(tmp_path / run, tmp_path / "set.npz", tmp_path / "all.npy")
        assert ("stay unjudged" in capsys.readouterr().out) is told
    assert weight_N.sum() >= 8  # a class at least, of which nothing is known
    with pytest.raises(ValueError, match="the set has the class 5; the checkpoint has 0 to 3"):
        dropped(tmp_path / "run", tmp_path / "other.npz", tmp_path / "w.npy")
    assert not (tmp_path / "w.npy").exists()
