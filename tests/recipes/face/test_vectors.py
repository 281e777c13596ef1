"""Recipe `face` on vectors: the head alone, and small networks; resumed, delivered, embedded."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import partial_fc
from partial_fc.comm import SingleWorld
from partial_fc.models.vectors import input_of
from partial_fc.optim import backbone as optimizers
from partial_fc.train.backbone import TorchBackbone
from partial_fc.train.precision import Precision
from partial_fc.verbs.model import classify, embed, search
from tests.running import losses, result, train_here
from tests.unit.data.test_vectors import write

C, D = 60, 12
ALONE = SingleWorld(), torch.device("cpu")
FLAGS = (
    f"--embedding-size {D} --margins 1 0 0.1 --batch-size 16 --lr 0.01 --weight-decay 0 --lr-scheduler constant "
    "--warmup-steps 0 --checkpoint-every 4"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Clusters about random directions: train.npz, test.npz, new.npz of other classes."""
    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    for name, each, first in (("train", 8, 0), ("test", 3, 0), ("new", 4, 1)):
        centre_CD = np.random.default_rng(first).normal(size=(C, D))
        label_N = np.repeat(np.arange(C), each)
        row_ND = centre_CD[label_N] + 0.3 * rng.normal(size=(len(label_N), D))
        np.savez(folder / f"{name}.npz", embeddings=row_ND.astype(np.float32), labels=label_N)
    return folder


def train(data: Path, root: Path, flags: str) -> str:
    return train_here(root, f"--rec {data}/train.npz {FLAGS} {flags}")


@pytest.mark.parametrize(
    "network",
    [
        pytest.param("none", marks=pytest.mark.long),
        "linear --embedding-size 10 --balance sqrt",
        pytest.param("mlp:20 --embedding-size 10", marks=pytest.mark.long),
    ],
)
def test_it_learns_and_resumes_bit_by_bit(network, data, tmp_path):
    flags = f"--network {network} --val-targets test --sample-rate 0.5 --max-steps"
    printed = train(data, tmp_path / "whole", f"{flags} 120")
    assert "vectors" in printed
    assert "images" not in printed
    assert result(tmp_path / "whole")["evaluations"]["test/rank1"] > 0.9
    train(data, tmp_path / "parts", f"{flags} 6")
    assert "resumed from" in train(data, tmp_path / "parts", f"{flags} 120")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    a, b = (load_file(root / "model.safetensors") for root in (tmp_path / "whole", tmp_path / "parts"))
    assert (not a) == network.startswith("none")
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_two_files_train_what_one_does(data, tmp_path):
    row_ND, label_N = np.load(data / "train.npz").values()
    for name, some in (("a", label_N < 25), ("b", label_N >= 25)):
        np.save(tmp_path / f"{name}.npy", row_ND[some])
        np.save(tmp_path / f"{name}.labels.npy", label_N[some] - label_N[some][0])
    flags = f"--network linear --embedding-size 10 --max-steps 20 --val-targets {data / 'test.npz'} --rec"
    train(data, tmp_path / "one", f"{flags} {data / 'train.npz'}")
    printed = train(data, tmp_path / "two", f"{flags} {tmp_path / 'a.npy'} {tmp_path / 'b.npy'}")
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert result(tmp_path / "two")["evaluations"] == result(tmp_path / "one")["evaluations"]
    assert "set b: 280 vectors, classes 25 to 59" in printed


@pytest.mark.parametrize("network", ["none", "linear --embedding-size 10"])
def test_centres_of_vectors_are_imprinted(network, data, tmp_path):
    flags = f"--network {network} --start-centres imprint --lr 1e-6 --max-steps 1 --val-targets test"
    assert "60 classes are means of 480" in train(data, tmp_path / "run", flags)
    assert result(tmp_path / "run")["evaluations"]["test/rank1"] > 0.9


@pytest.fixture(scope="module", params=["none", "mlp:20 --embedding-size 10"])
def run(request, data, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("run")
    train(data, root, f"--network {request.param} --max-steps 60")
    return root


def test_a_run_embeds_searches_and_classifies(run, data, tmp_path, capsys):
    model = partial_fc.load(run)
    row_ND = np.load(data / "new.npz")["embeddings"]
    unit_ND = model.embed(row_ND)
    np.testing.assert_allclose(np.linalg.norm(unit_ND, axis=1), 1, rtol=1e-6)
    if model.name == "none":
        np.testing.assert_allclose(unit_ND, row_ND / np.linalg.norm(row_ND, axis=1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(model.embed(row_ND[3])[0], unit_ND[3], rtol=1e-5)
    assert model.facts()["input_size"] == str(D)
    for source in (run / "model.safetensors", run / "checkpoints"):
        np.testing.assert_array_equal(partial_fc.load(source).embed(row_ND), unit_ND)

    table = tmp_path / "new.npz"
    embed.embed(embed.EmbedOptions(model=run, images=(data / "new.npz",), out=table), *ALONE)
    np.testing.assert_allclose(np.load(table)["embeddings"], unit_ND, rtol=1e-5, atol=1e-6)
    search.search_faces(search.SearchOptions(model=run, gallery=(table,), out=tmp_path / "search"), *ALONE)
    assert "240 images, 60 classes" in capsys.readouterr().out
    given, twice = (data / "new.npz", tmp_path / "new.parquet"), tmp_path / "twice.npz"
    write(given[1], row_ND, np.load(data / "new.npz")["labels"])
    embed.embed(embed.EmbedOptions(model=run, images=given, out=twice, shared_classes=True), *ALONE)
    np.testing.assert_allclose(np.load(twice)["embeddings"], np.tile(unit_ND, (2, 1)), rtol=1e-5, atol=1e-6)
    assert np.load(twice)["keys"][[0, 240]].tolist() == ["new/0", "new-2/0"]
    capsys.readouterr()
    assert classify.classify(classify.ClassifyOptions(checkpoint=run, images=(data / "test.npz",), top=1)) == 0
    printed = capsys.readouterr().out.splitlines()[1:]
    found = [int(line.split()[-1].rstrip(")")) for line in printed[1::2]]
    assert np.mean(np.array(found) == np.load(data / "test.npz")["labels"]) > 0.9


def test_images_and_vectors_are_not_mixed_up(run, data, tmp_path):
    model = partial_fc.load(run)
    with pytest.raises(ValueError, match=r"an array \(9,\); expected a vector of 12"):
        model.embed(np.ones((2, 9), np.float32))
    with pytest.raises(ValueError, match="image 1: NaN or Inf, or only zeros"):
        model.embed(np.stack([np.ones(D), np.zeros(D)]))
    (tmp_path / "a.png").write_bytes(b"no vector")
    with pytest.raises(ValueError, match="expected a vector of 12"):
        embed.embed(embed.EmbedOptions(model=run, images=(tmp_path / "a.png",), out=tmp_path / "a.npz"), *ALONE)


def test_what_is_wrong_ends_the_run_before_the_first_step(data, tmp_path):
    row_ND, label_N = np.load(data / "train.npz").values()
    row_ND[7] = np.nan
    np.savez(tmp_path / "train.npz", embeddings=row_ND, labels=label_N)
    np.savez(tmp_path / "b.npz", embeddings=row_ND[:, :5], labels=label_N)
    (tmp_path / "list.txt").write_text("x.jpg 0\n")
    (tmp_path / "images.sets").write_text("photos list.txt\n")
    for flags, match in (
        ("--network none --max-bad-records 0", r"(?s)1 of 480 vectors.*train\.npz, row 7"),
        ("--network none --num-classes 50", r"train\.npz, row 400: label 50; expected 0 to 49"),
        ("--network none --embedding-size 10", "--embedding-size 10.*the vectors' 12"),
        ("--network none --val-targets gone", r"gone\.npz"),
        (
            f"--network none --rec {data / 'train.npz'} {tmp_path / 'train.npz'} --max-bad-records 0",
            r"(?s)1 of 960 vectors.*set train-2: .*row 7",
        ),
        (
            f"--network none --rec {data / 'train.npz'} {tmp_path / 'b.npz'}",
            "the sets differ: b has vectors of 5, train has vectors of 12",
        ),
        (f"--network none --rec {tmp_path / 'images.sets'}", "x.jpg: an image; .*expected vectors"),
    ):
        with pytest.raises(ValueError, match=match):
            train(tmp_path, tmp_path / "run", f"{flags} --max-steps 2")
    printed = train(tmp_path, tmp_path / "run", "--network none --max-steps 40")
    assert "train.npz, row 7" in printed


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_a_gradient_with_nan_is_found_without_a_backbone(optimizer):
    precision = Precision("fp16", torch.device("cpu"))
    backbone = TorchBackbone(
        torch.nn.Identity(), SingleWorld(), precision, lambda weights: optimizers.build(optimizer, weights, 0.9, 0.1),
        input_of(3), {"network": "none"},
    )  # fmt: skip
    backbone.freeze(False)
    assert (backbone.scaler, backbone.may_overflow, backbone.replicated()) == (None, False, {})
    for bad in (torch.nan, 1.0):
        backbone.zero(2)
        given_B = backbone.forward(torch.full((2, 3), 0.1))
        assert given_B.requires_grad
        assert torch.equal(given_B.detach(), torch.full((2, 3), 0.1))
        backbone.backward(torch.full((2, 3), bad))
        assert backbone.gradients(torch.ones(2, 3), torch.ones(2, 3)) == {}
        backbone.wait()
        assert bool(backbone.finite()) == (bad == 1.0)
        assert backbone.square_sum() == 0
        backbone.step(0.1)
