"""A run's model after training: loaded from every file that it may be in, it embeds as training's verification did."""

import json
import shutil
from html import unescape
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import partial_fc
from partial_fc import checkpoint, cli, models
from partial_fc.comm import SingleWorld
from partial_fc.data.decode import decode
from partial_fc.data.pairs import read_pairs, write_pairs
from partial_fc.embedding.load import find
from partial_fc.embedding.model import EmbeddingModel
from partial_fc.evaluate import verification
from partial_fc.verbs.data.pack import PackOptions, pack_images
from partial_fc.verbs.model import classify
from partial_fc.verbs.model import embed as command
from partial_fc.verbs.report.page import page
from partial_fc.verbs.report.run_facts import read_run
from recipes.face.backbone import ModelFlags, build
from tests.running import ENCODER, losses, same_tensors, train_here

SIZE, D = 20, 8
CLASSES = ("ada", "bob", "cyd", "dov")
FLAGS = f"--network tiny --image-size {SIZE} --embedding-size {D} --batch-size 8 --no-mirror --precision fp32"


def picture(seed: int) -> bytes:
    return cv2.imencode(".png", np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), np.uint8))[1].tobytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, np.ndarray]:
    """(folder with data/, list, .rec and run/; the embeddings of training's verification, of 2 x 11 images)."""
    folder = tmp_path_factory.mktemp("embedding")
    for number, name in enumerate(CLASSES):
        (folder / "data" / name).mkdir(parents=True)
        for i in range(3):
            (folder / "data" / name / f"{i}.png").write_bytes(picture(10 * number + i))
    write_pairs(folder / "unseen.bin", [picture(100 + i) for i in range(22)], [i % 2 == 0 for i in range(11)])
    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:

        def recorded(*arguments):
            unit_ID, norm_I = verification_embeds(*arguments)
            seen.append(unit_ID)
            return unit_ID, norm_I

        verification_embeds = verification.unit_embeddings
        patch.setattr(verification, "unit_embeddings", recorded)
        sets = f"--val-targets {folder / 'unseen.bin'} --verbose 0 --check-data off --max-steps 3"
        train_here(folder / "run", f"{FLAGS} --rec {folder / 'data'} {sets}")
    return folder, torch.cat(seen).float().numpy()


@pytest.fixture(scope="module")
def model(run) -> EmbeddingModel:
    return partial_fc.load(run[0] / "run")


def test_embeds_as_trainings_own_verification_bit_for_bit(run, model):
    folder, expected = run
    images, _ = read_pairs(folder / "unseen.bin")
    assert len(expected) == len(images) == 22
    embeddings = model.embed(images, batch_size=16)  # as many as verification takes
    assert embeddings.dtype == np.float32
    np.testing.assert_array_equal(embeddings, expected)
    assert not np.array_equal(model.embed(images, batch_size=16, flip=True), expected)
    result = json.loads((folder / "run/result.json").read_text())["evaluations"]
    again = dict(
        verification.Verification(folder / "unseen.bin", SIZE, 16, model.flip).run(model.forward, SingleWorld())
    )
    assert again["unseen/xnorm"] == result["unseen/xnorm"]


def test_every_kind_of_path(run, model, tmp_path):
    root, weights = run[0] / "run", load_file(run[0] / "run/model.safetensors")
    step = root / "checkpoints/step-00000003"
    torch.save(weights, tmp_path / "model.pt")
    torch.save(weights, tmp_path / "backbone.pth")
    torch.save({"epoch": 1, "state_dict_backbone": weights}, tmp_path / "checkpoint_gpu_0.pt")
    checkpoint.save_tensors(weights, tmp_path / "bare.safetensors")
    assert (model.source, model.step, model.flip, model.image_size) == (root / "model.safetensors", 3, False, SIZE)
    expected = model.embed(picture(7))
    own = [root / "model.safetensors", step, step.parent, step / "backbone.safetensors"]
    for path in (*own, *sorted(tmp_path.iterdir())):
        found = partial_fc.load(path, image_size=SIZE, flip=None if path in own else False)
        np.testing.assert_array_equal(found.embed(picture(7)), expected, err_msg=str(path))
        assert (found.name, found.embedding_size, found.image_size) == ("tiny", D, SIZE)
        assert found.flip is False
        assert found.step == (3 if path in own else None)
    assert partial_fc.load(tmp_path / "model.pt").flip, "arcface_torch's rule, where the file says nothing"
    assert partial_fc.load(tmp_path / "model.pt").image_size == 24, "the largest that fits: three halvings"


def test_every_kind_of_image(run, model):
    path = run[0] / "data/ada/0.png"
    rgb = decode(path.read_bytes())
    kinds = [path, str(path), path.read_bytes(), rgb, Image.open(path), Image.open(path).convert("RGBA")]
    (row,) = model.embed(path)
    assert np.linalg.norm(row) == pytest.approx(1)
    for kind in kinds:
        np.testing.assert_array_equal(model.embed(kind)[0], row)
    np.testing.assert_array_equal(model.embed(iter(kinds), batch_size=1), np.stack([row] * len(kinds)))
    assert model.embed([]).shape == (0, D)
    assert model.embed(np.stack([rgb, rgb])).shape == (2, D)
    with pytest.raises(ValueError, match=r"image 1, .*gone\.png: No such file"):
        model.embed([path, path.with_name("gone.png")])
    with pytest.raises(ValueError, match=r"image 2: an array of float32 \(20, 20, 3\); expected uint8"):
        model.embed([rgb, rgb, rgb.astype(np.float32)])
    with pytest.raises(TypeError, match="int is no image"):
        model.embed([rgb, 7])
    rows = model.embed([rgb, b"no image", rgb], on_error="nan")
    assert np.isnan(rows[1]).all()
    assert np.isfinite(rows[[0, 2]]).all()
    model.network.get_parameter("fc.bias").data.fill_(torch.nan)
    try:
        with pytest.raises(ValueError, match=r"image 0.*NaN.*diverged"):
            model.embed(rgb)
    finally:
        model.network.load_state_dict(load_file(run[0] / "run/model.safetensors"))


def test_what_cannot_be_loaded_is_named(run, tmp_path):
    root = run[0] / "run"
    content = (root / "model.safetensors").read_bytes()
    weights = load_file(root / "model.safetensors")

    def refused(name: str, message: str, **facts):
        if facts:
            checkpoint.save_tensors(weights, tmp_path / name, facts)
        with pytest.raises(ValueError, match=message) as error:
            partial_fc.load(tmp_path / name)
        assert name in str(error.value)

    (tmp_path / "cut.safetensors").write_bytes(content[: len(content) // 2])
    refused("cut.safetensors", "cut short")
    torch.save(weights, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-5000])
    refused("cut.pt", "cannot be read")
    torch.save({"blocks.0.attn.qkv.weight": torch.ones(2)}, tmp_path / "vit.pt")
    refused("vit.pt", "no network that is known here: names like blocks")
    (tmp_path / "model-0000.params").touch()
    refused("model-0000.params", "partial-fc convert")
    refused("none", "not found; expected a run's folder")
    (tmp_path / "empty").mkdir()
    refused("empty", "no complete checkpoint")
    refused("resnet.safetensors", "resnet50 of recipe imagenet.*no embedding", network="resnet50", recipe="imagenet")
    sizes = {"embedding_size": str(D), "image_size": str(SIZE)}
    refused("r18.safetensors", "does not fit this r18", network="r18", **sizes)
    refused("size.safetensors", "image size ''; expected whole numbers", network="tiny", embedding_size="8")
    refused("std.safetensors", "expected above 0", network="tiny", **sizes, mean="1", std="0")
    refused("input.safetensors", "its metadata is invalid", network="tiny", **sizes, input="as it comes")
    with pytest.raises(ValueError, match="trained on images of 20 pixels; image_size is 112"):
        partial_fc.load(root, image_size=112)
    with pytest.raises(ValueError, match="device 'abacus' cannot be used"):
        partial_fc.load(root, "abacus")


def test_pretrained_takes_a_run_and_refuses_another_network(run, tmp_path):
    root, cpu = run[0] / "run", torch.device("cpu")
    weights = load_file(root / "model.safetensors")
    flags = {"network": "tiny", "embedding_size": D}
    for path in (root, root / "checkpoints", root / "model.safetensors"):
        module = build(ModelFlags(**flags, pretrained=path), SIZE, cpu).module
        assert all(torch.equal(t, weights[name]) for name, t in module.state_dict().items())
    for change, now in (({"network": "r18"}, "r18"), ({"embedding_size": 16}, "tiny with --embedding-size 16")):
        with pytest.raises(ValueError, match=f"--pretrained .*is a backbone tiny .*-size {D} .*this run has {now}"):
            build(ModelFlags(**flags | change, pretrained=root), SIZE, cpu)
    with pytest.raises(ValueError, match=r"--pretrained .*tiny .*--image-size 20; this run has .*--image-size 48"):
        build(ModelFlags(**flags, pretrained=root), 48, cpu)


def embed(run, images: list[Path], out: Path, **options) -> dict[str, np.ndarray]:
    given = command.EmbedOptions(model=run[0] / "run", images=tuple(images), out=out, **options)
    command.embed(given, SingleWorld(), torch.device("cpu"))
    with np.load(out) as file:
        return dict(file)


def test_tables_of_folders_lists_records_and_files(run, model, tmp_path):
    folder = run[0]
    names = [f"{name}/{i}.png" for name in CLASSES for i in range(3)]
    expected = model.embed([folder / "data" / name for name in names], batch_size=5)
    table = embed(run, [folder / "data"], tmp_path / "a.npz", batch_size=5)
    assert table["keys"].tolist() == names
    assert table["labels"].tolist() == [i // 3 for i in range(12)]
    assert table["class_names"].tolist() == list(CLASSES)
    assert str(table["model_step"]) == "3"
    np.testing.assert_array_equal(table["embeddings"], expected)

    (tmp_path / "labelled.txt").write_text("".join(f"{folder / 'data' / name} 7\n" for name in names))
    assert embed(run, [tmp_path / "labelled.txt"], tmp_path / "b.npz")["labels"].tolist() == [7] * 12
    (tmp_path / "plain.txt").write_text("".join(f"{folder / 'data' / name}\n" for name in names))
    for given in ([tmp_path / "plain.txt"], [folder / "data" / name for name in names]):
        table = embed(run, given, tmp_path / "c.npz", batch_size=5)
        assert "labels" not in table
        assert table["keys"].tolist() == [str(folder / "data" / name) for name in names]
        np.testing.assert_array_equal(table["embeddings"], expected)
    assert embed(run, [folder / "data/bob"], tmp_path / "d.npz")["keys"].tolist() == ["0.png", "1.png", "2.png"]

    pack_images(PackOptions(folder / "data", tmp_path / "packed"))
    table = embed(run, [tmp_path / "packed"], tmp_path / "e.npz", batch_size=5)
    assert sorted(table["labels"].tolist()) == [i // 3 for i in range(12)]
    assert table["keys"].tolist() == [str(i) for i in range(1, 13)]

    import pyarrow.parquet

    embed_to = command.EmbedOptions(
        model=folder / "run", images=(folder / "data",), out=tmp_path / "f.parquet", batch_size=5
    )
    command.embed(embed_to, SingleWorld(), torch.device("cpu"))
    rows = pyarrow.parquet.read_table(tmp_path / "f.parquet")
    assert rows.column_names == ["key", "label", "class", "embedding"]
    np.testing.assert_array_equal(np.stack(rows["embedding"].to_pylist()).astype(np.float32), expected)
    assert rows["class"].to_pylist()[::3] == list(CLASSES)


def test_several_sets_are_embedded_and_searched(run, tmp_path, monkeypatch, capsys):
    """As typed: paths, a pattern and a file of sets."""
    folder, sets = run[0], [tmp_path / "one", tmp_path / "two"]
    shutil.copytree(folder / "data", sets[0])
    for name, of in (("bob", "bob"), ("eve", "cyd")):
        shutil.copytree(folder / "data" / of, sets[1] / name)
    (tmp_path / "all.sets").write_text("first one\nsecond two 3\n")
    pack_images(PackOptions(sets[0], tmp_path / "packed"))
    for i in range(2):
        for suffix in (".rec", ".idx"):
            shutil.copy(tmp_path / f"packed/train{suffix}", tmp_path / f"{i}{suffix}")
    monkeypatch.chdir(tmp_path)

    def typed(words: str, status: int | None = None) -> str:
        assert cli.run(words.split()[0], words.split()[1:]) == status
        return "".join(capsys.readouterr())

    def table(words: str) -> dict[str, np.ndarray]:
        typed(f"embed {folder}/run {words} --out t.npz --batch-size 6")
        with np.load(tmp_path / "t.npz") as file:
            return dict(file)

    alone = table("one")["embeddings"]
    for words, names in (("one two", ("one", "two")), ("all.sets", ("first", "second"))):
        both = table(words)
        np.testing.assert_array_equal(both["embeddings"], np.concatenate((alone, alone[3:9])))
        assert both["keys"][[0, 12, 17]].tolist() == [
            f"{names[0]}/ada/0.png",
            f"{names[1]}/bob/0.png",
            f"{names[1]}/eve/2.png",
        ]
        assert both["labels"].tolist() == [i // 3 for i in range(18)]
        assert both["class_names"][[1, 4]].tolist() == [f"{names[0]}/bob", f"{names[1]}/bob"]
    shared = table("one two --shared-classes")
    assert shared["labels"][12:].tolist() == [1] * 3 + [4] * 3
    assert shared["class_names"].tolist() == [*CLASSES, "eve"]
    keys = table("[01].rec")["keys"].tolist()
    assert len(set(keys)) == 24
    assert [key.partition("/")[2] for key in keys[::12]] == ["0.rec/1", "1.rec/1"]

    assert "18 images, 6 classes" in typed(f"search {folder}/run --gallery all.sets --out found")
    typed(f"embed {folder}/run one two --shared-classes --out t.parquet")
    typed(f"embed {folder}/run one --out t.npz")
    typed(f"embed {folder}/run two --out probe.npz")
    for gallery in ("one two --shared-classes", "t.parquet", "t.npz probe.npz --shared-classes"):
        typed(f"search {folder}/run --gallery {gallery} --probe probe.npz --out found")
        found = json.loads((tmp_path / "found/search.json").read_text())
        assert found["probe"]["with_mate"] == 6
        assert found["gallery"]["classes"] == 5 or "npz" in gallery
    assert "one has images, t has vectors of 8; expected" in typed(f"embed {folder}/run one t.npz --out u.npz", 1)


def test_an_image_that_cannot_be_used_leaves_no_table_or_nan(run, tmp_path, capsys):
    folder = tmp_path / "faces"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.png").write_bytes(picture(i) if i != 3 else b"nothing")
    with pytest.raises(ValueError, match=r"faces/3\.png: no image.*image 3 of 5; --on-bad nan"):
        embed(run, [folder], tmp_path / "a.npz", batch_size=2)
    assert not list(tmp_path.glob("a.npz*"))
    table = embed(run, [folder], tmp_path / "a.npz", batch_size=2, on_bad="nan")
    assert np.isnan(table["embeddings"]).all(axis=1).tolist() == [False, False, False, True, False]
    assert "NaN for 1 image that could not be used" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"\.csv: "):
        command.EmbedOptions(model=folder, images=(folder,), out=tmp_path / "a.csv")


def test_classify_prints_the_nearest_centres(run, model, capsys):
    folder = run[0]
    paths = (folder / "data/bob/1.png", folder / "data/dov/2.png")
    assert classify.classify(classify.ClassifyOptions(checkpoint=folder / "run", images=paths, top=3)) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    with pytest.raises(ValueError, match=r"model\.safetensors is a file, without class centres"):
        classify.classify(classify.ClassifyOptions(checkpoint=folder / "run/model.safetensors", images=paths))
    (part,) = (folder / "run/checkpoints/step-00000003").glob("head-*-classes-*")
    centre_CD = load_file(part)["centres"].float().reshape(len(CLASSES), D)
    cosine_NC = model.embed(paths) @ torch.nn.functional.normalize(centre_CD).numpy().T
    assert [lines[0], lines[4]] == list(map(str, paths))
    for row, shown in zip(cosine_NC, (lines[1:4], lines[5:8]), strict=True):
        order = np.argsort(-row)[:3]
        for line, number in zip(shown, order, strict=True):
            cosine, name = line.split(maxsplit=1)
            assert float(cosine) == pytest.approx(row[number], abs=1e-4)
            assert name == f"{CLASSES[number]} (class {number})"


def test_weights_of_mobilefacenet_are_known_by_their_shapes(tmp_path):
    for name, size in (("mbf", 64), ("r18", 48)):
        torch.save(models.build(name, D, size).state_dict(), tmp_path / f"{name}.pt")
        found = find(tmp_path / f"{name}.pt")
        assert (found.network.name, found.network.embedding_size, found.network.image_size) == (name, D, size)


def test_a_network_of_ones_own_resumes_is_reported_and_loaded_as_the_report_says(run, tmp_path):
    (tmp_path / "encoder.py").write_text(ENCODER)
    named = f"{tmp_path}/encoder.py:make"
    flags = f"--rec {run[0] / 'data'} --network {named} --image-size 32 --embedding-size {D} --batch-size 8 "
    flags += "--val-targets --check-data off --lr-scheduler constant --warmup-steps 1 --max-steps"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for root, steps in ((whole, 3), (parts, 2), (parts, 3)):
        train_here(root, f"{flags} {steps}")
    assert losses(parts) == losses(whole)
    assert same_tensors(whole, parts) == 1
    text = unescape(page(read_run(parts)))
    assert f"recipe face, {named}, " in text
    model = partial_fc.load(parts, trust_code=True)
    assert model.embed([np.zeros((32, 32, 3), np.uint8)]).shape == (1, D)
