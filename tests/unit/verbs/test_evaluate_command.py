"""`partial-fc evaluate`: thresholds, CSV lists, and what it writes."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from partial_fc import models
from partial_fc.comm import SingleWorld
from partial_fc.data.pairs import write_pairs
from partial_fc.embedding.load import load
from partial_fc.evaluate.roc import Roc
from partial_fc.pictures import GAP, SIDE
from partial_fc.verbs.data.pair_list import read_pair_list
from partial_fc.verbs.model.embed import EmbedOptions, embed
from partial_fc.verbs.model.evaluate import EvaluateOptions, evaluate, output_folder

SIZE = 40
ALONE = SingleWorld(), torch.device("cpu")


def read_report(folder):
    return json.loads((folder / "evaluation.json").read_text())


# Thresholds


@pytest.mark.parametrize("seed", range(3))
def test_thresholds_give_what_they_say(seed):
    rng = np.random.default_rng(seed)
    same = rng.random(400) < 0.5
    distance = np.round(rng.normal(np.where(same, 1.0, 1.6), 0.25).clip(0, 4), 2)  # many ties
    roc = Roc.from_distances(distance, same, None)

    def right(threshold):
        return ((distance <= threshold) == same).mean()

    best = roc.best()
    assert best.accuracy == pytest.approx(right(best.distance))
    assert best.accuracy == pytest.approx(max(right(t) for t in distance))
    assert best.cosine == pytest.approx(1 - best.distance / 2)
    for far in (0.01, 0.1):
        at = roc.threshold_at(far)
        assert at.far == (distance <= at.distance)[~same].mean() <= far
        assert at.tar == (distance <= at.distance)[same].mean() == roc.tar_at(far)
    assert roc.threshold_at(1e-3) is None  # 200 impostors cannot tell


# CSV files


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")


@pytest.mark.parametrize(
    "text",
    [
        "a/1.jpg,a/2.jpg,same\na/1.jpg,b/1.jpg,different\n",
        "image1,image2,same\na/1.jpg, a/2.jpg, 1\n\na/1.jpg,b/1.jpg,0\n",
        '\ufefffirst,second,kind\n"a/1.jpg","a/2.jpg",True\na/1.jpg,b/1.jpg,FALSE',
        "a/1.jpg\ta/2.jpg\tyes\r\na/1.jpg\tb/1.jpg\tno\r\n",
    ],
    ids=["plain", "header", "spreadsheet", "tabs"],
)
def test_lists_of_pairs(tmp_path, text):
    touch(tmp_path, "a/1.jpg", "a/2.jpg", "b/1.jpg")
    (tmp_path / "pairs.csv").write_text(text)
    pairs = read_pair_list(tmp_path / "pairs.csv")
    assert (pairs.images.root, pairs.images.names) == (tmp_path, ["a/1.jpg", "a/2.jpg", "b/1.jpg"])
    assert (pairs.first_N.tolist(), pairs.second_N.tolist()) == ([0, 0], [1, 2])
    assert pairs.same_N.tolist() == [True, False]


# The verb


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A folder with model.safetensors, set.bin of 40 pairs and list.csv of the same pairs."""
    folder = tmp_path_factory.mktemp("given")
    torch.manual_seed(3)
    facts = {"network": "tiny", "embedding_size": "16", "image_size": str(SIZE), "flip": "false"}
    save_file(models.build("tiny", 16, SIZE).state_dict(), folder / "model.safetensors", metadata=facts)
    rng = np.random.default_rng(5)
    same = rng.random(40) < 0.5
    encoded, lines = [], []
    for pair, is_same in enumerate(same):
        images = rng.integers(0, 256, (2, SIZE, SIZE, 3))
        if is_same:
            images[1] = (images[0] + rng.normal(0, 150, images[0].shape)).clip(0, 255)
        encoded += [cv2.imencode(".png", image.astype(np.uint8))[1].tobytes() for image in images]
        for which in (0, 1):
            (folder / f"{pair}-{which}.png").write_bytes(encoded[2 * pair + which])
        lines.append(f"{pair}-0.png,{pair}-1.png,{int(is_same)}")
    write_pairs(folder / "set.bin", encoded, same.tolist())
    (folder / "list.csv").write_text("\n".join(lines))
    return folder, same


def test_a_bin_and_a_list_of_the_same_pairs_agree(given, tmp_path, capsys):
    folder, same = given
    evaluate(EvaluateOptions(
        model=folder / "model.safetensors", sets=(folder / "set.bin", folder / "list.csv"), out=tmp_path, batch_size=16
    ), *ALONE)  # fmt: skip
    report, printed = read_report(tmp_path), capsys.readouterr().out
    row_ND = load(folder / "model.safetensors").embed([folder / f"{n // 2}-{n % 2}.png" for n in range(80)])
    cosine = (row_ND[0::2] * row_ND[1::2]).sum(1)
    for name in ("set", "list"):
        one = report["sets"][name]
        threshold = one["threshold"]
        right = ((cosine >= threshold["cosine"]) == same).mean()
        assert threshold["accuracy"] == pytest.approx(right)
        assert 0.6 < right < 1.0  # the set is neither hopeless nor trivial
        assert f"{name}: 40 pairs, {same.sum()} of them the same" in printed
        assert f"{threshold['cosine']:.4f}" in printed
        assert cv2.imread(str(tmp_path / f"worst_pairs_{name}.png")).shape[1] == 5 * (2 * SIDE + GAP) + GAP
    assert report["sets"]["set"]["values"]["accuracy"] == report["sets"]["list"]["values"]["accuracy"]
    assert cv2.imread(str(tmp_path / "roc.png")) is not None


def test_all_pairs_of_a_folder_and_of_its_table(given, tmp_path, capsys):
    folder, _ = given
    model, images = folder / "model.safetensors", tmp_path / "images"
    rng = np.random.default_rng(6)
    for number, path in enumerate(sorted(folder.glob("*.png"))):  # 80 classes of two images, more and more different
        (images / path.stem).mkdir(parents=True)
        (images / path.stem / "a.png").write_bytes(path.read_bytes())
        other = cv2.imread(str(path)) + 2 * number * rng.normal(size=(SIZE, SIZE, 3))
        cv2.imwrite(str(images / path.stem / "b.png"), other.clip(0, 255).astype(np.uint8))
    evaluate(EvaluateOptions(model=model, sets=(folder / "set.bin",), all_pairs=(images,), out=tmp_path / "a"), *ALONE)
    embed(EmbedOptions(model=model, images=(images,), out=tmp_path / "table.npz", batch_size=128), *ALONE)
    printed = capsys.readouterr().out
    assert "all pairs of 160 images of 80 classes: 12,720, 80 of them the same" in printed
    assert "FAR 1e-5 and below cannot be measured with 12,640 pairs of different classes" in printed
    evaluate(EvaluateOptions(all_pairs=(tmp_path / "table.npz",)), *ALONE)
    found, again = (read_report(tmp_path / name) for name in ("a", "evaluation"))
    assert [*found["sets"], *again["sets"]] == ["set"]
    assert found["all_pairs"].pop("paths") == [str(images)]
    assert again["all_pairs"].pop("paths") == [str(tmp_path / "table.npz")]
    assert again["all_pairs"] == found["all_pairs"]

    table = np.load(tmp_path / "table.npz")
    cosine_NN = table["embeddings"] @ table["embeddings"].T
    same_NN = table["labels"][:, None] == table["labels"]
    once = np.triu_indices(160, 1)
    roc = Roc.from_distances(2 - 2 * cosine_NN[once], same_NN[once], None)
    at = found["all_pairs"]["threshold_at_far"]["1e-4"]
    assert 0.1 < at["tar"] < 0.9
    assert at["tar"] == found["all_pairs"]["values"]["tar@far=1e-4"] == roc.tar_at(1e-4)
    assert at["cosine"] == pytest.approx(roc.threshold_at(1e-4).cosine, abs=1e-6)

    with pytest.raises(ValueError, match="MODEL is missing"):
        evaluate(EvaluateOptions(all_pairs=(images,), out=tmp_path / "b"), *ALONE)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "nothing to evaluate on"),
        ({"sets": ("a/lfw.bin", "b/lfw.bin")}, "two sets"),
        ({"sets": ("lfw.zip",)}, r"lfw\.zip: expected a \.bin or \.parquet of pairs, or a \.csv"),
    ],
)
def test_flags_that_cannot_be_meant(tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path, "a/lfw.bin", "b/lfw.bin", "lfw.zip")
    with pytest.raises(ValueError, match="MODEL is missing"):
        EvaluateOptions(ijb=tmp_path, all_pairs=(tmp_path / "table.npz",))
    with pytest.raises(ValueError, match=words):
        EvaluateOptions(model=tmp_path, sets=tuple(map(Path, flags.get("sets", ()))))


def test_nothing_is_written_among_checkpoints(tmp_path):
    step = tmp_path / "run" / "checkpoints" / "step-00000020"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    (step / "COMPLETE").touch()
    for model in (tmp_path / "run", step.parent, step):
        assert output_folder(None, model, "evaluation") == tmp_path / "run" / "evaluation"
    (tmp_path / "model.pt").touch()
    assert output_folder(None, tmp_path / "model.pt", "search") == tmp_path / "search"
    assert output_folder(tmp_path / "a" / "b", step, "search").is_dir()
    with pytest.raises(ValueError, match=r"cannot be created: .*--out"):
        output_folder(tmp_path / "model.pt" / "x", step, "search")
