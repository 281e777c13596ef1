"""--compatible-with: a new model whose embeddings are searched among an older one's."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import partial_fc
from partial_fc.checkpoint.read import Checkpoint
from partial_fc.checkpoint.rows_now import rows_now
from partial_fc.comm import SingleWorld
from partial_fc.data.open import open_source
from partial_fc.verbs.model.evaluate import EvaluateOptions, evaluate
from tests.running import losses, train_here, train_several
from tests.world.made import class_folders, image, write_rec

FLAGS = "--check-data off --image-size 40 --batch-size 8 --network tiny --lr-scheduler constant --warmup-steps 0"
OLD, NEW = f"{FLAGS} --embedding-size 16 --max-steps 6", f"{FLAGS} --embedding-size 24 --max-steps 6"


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """(all 12 classes, 7 of them and one more)."""
    root = tmp_path_factory.mktemp("sets")
    whole = class_folders(root / "all")
    part = class_folders(root / "part")
    for number in (0, 3, 4, 8, 11):
        shutil.rmtree(part / f"id{number:03d}")
    shutil.copytree(part / "id001", part / "another")
    return whole, part


@pytest.fixture(scope="module")
def old(sets, tmp_path_factory):
    root = tmp_path_factory.mktemp("old")
    train_here(root, f"--rec {sets[1]} {OLD} --no-mirror")
    return root


def newest(root):
    return sorted((root / "checkpoints").glob("step-*"))[-1]


def centres(root, table: str = "") -> torch.Tensor:
    rows = rows_now(Checkpoint(newest(root)), table=table)
    return rows.read(range(rows.stop))["centres"]


def test_the_older_centres_are_there_and_stay_on_any_number_of_ranks(sets, old, tmp_path):
    log = train_here(tmp_path / "one", f"--rec {sets[0]} {NEW} --no-mirror --compatible-with {old}")
    assert "it knows 7 of 12 classes" in log
    assert "the centres of 5 classes are means of 20 images" in log
    unit_CD = centres(tmp_path / "one", "old")
    source, model = open_source(sets[0]), partial_fc.load(old)
    before_CD, names = torch.nn.functional.normalize(centres(old)), Checkpoint(newest(old)).class_names
    row_ND = model.embed([sets[0] / source.class_names()[source.read(i).label] / f"{i % 4}.jpg" for i in range(48)])
    for number, name in enumerate(source.class_names()):
        if name in names:
            wanted_D = before_CD[names.index(name)]
        else:
            wanted_D = torch.nn.functional.normalize(
                torch.from_numpy(row_ND[4 * number : 4 * number + 4]).sum(0), dim=0
            )
        torch.testing.assert_close(unit_CD[number], wanted_D, rtol=1e-5, atol=1e-6)

    half = NEW.replace("--max-steps 6", "--max-steps 3")
    flags = f"--rec {sets[0]} --no-mirror --compatible-with {old} --compatible-weight 0.5 --sync-bn --batch-size"
    train_here(tmp_path / "whole", f"{NEW} {flags} 8")
    train_several({tmp_path / "two": f"{half} {flags} 4"})
    train_here(tmp_path / "two", f"{NEW} {flags} 8")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    assert losses(tmp_path / "whole")[0] < losses(tmp_path / "one")[0], "by its weight"
    torch.testing.assert_close(centres(tmp_path / "two", "old"), unit_CD, rtol=0, atol=1e-6)


def test_classes_with_numbers_only_and_arcface_torchs_files(old, tmp_path):
    theirs, centre_CD = tmp_path / "theirs", centres(old)
    theirs.mkdir()
    torch.save({"weight": centre_CD}, theirs / "softmax_fc_gpu_0.pt")
    torch.save(load_file(old / "model.safetensors"), theirs / "model.pt")
    rec = write_rec(tmp_path / "rec", ((key, key // 4, image(key // 4, key % 4)) for key in range(40)))
    log = train_here(tmp_path / "new", f"--rec {rec} {NEW} --no-mirror --compatible-with {theirs}")
    assert "it knows 8 of 10 classes" in log
    torch.testing.assert_close(centres(tmp_path / "new", "old")[:8], torch.nn.functional.normalize(centre_CD))


def test_a_new_model_is_measured_against_an_older_one(sets, old, tmp_path, capsys):
    pairs = tmp_path / "pairs.csv"
    lines = [f"{sets[0]}/id{i:03d}/0.jpg,{sets[0]}/id{j:03d}/1.jpg,{'same' if i == j else 'different'}"
             for i in range(12) for j in (i, (i + 1) % 12)]  # fmt: skip
    pairs.write_text("\n".join(lines))
    options = EvaluateOptions(model=old, sets=(pairs,), against=old, all_pairs=(sets[0],), out=tmp_path / "out")
    evaluate(options, SingleWorld(), "cpu")
    assert "new, old" in capsys.readouterr().out
    report = json.loads((tmp_path / "out/evaluation.json").read_text())["against"]
    assert list(report["sets"]) == ["pairs", "all pairs"]
    for rates in report["sets"].values():
        assert rates["new, old"] == pytest.approx(rates["new, new"], nan_ok=True), "a model against itself"
        assert rates["old, old"] == pytest.approx(rates["new, new"], nan_ok=True)


@pytest.mark.parametrize("what", ["names", "wider", "centres", "vectors", "nothing", "heads"])
def test_what_cannot_be_compared(sets, old, tmp_path, what):
    rec, given, flags = sets[0], old, NEW
    match what:
        case "names":
            rec = class_folders(tmp_path / "others")
            for folder in list(rec.iterdir()):
                folder.rename(rec / f"other-{folder.name}")
            message = r"none of its 8 classes .* is in the data, which has 'other-id000'"
        case "wider":
            flags, message = f"{NEW} --embedding-size 8", "-> 16 features.* embeddings of 8 numbers"
        case "centres":
            given = tmp_path / "centres"
            shutil.copytree(old, given)
            (newest(given) / "backbone.safetensors").unlink()
            message = "backbone"
        case "vectors":
            np.savez(tmp_path / "table.npz", keys=np.array(["a"] * 8), labels=np.arange(8) // 2,
                     embeddings=np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32))  # fmt: skip
            rec, flags = (
                tmp_path / "table.npz",
                "--network none --batch-size 4 --max-steps 2 --warmup-steps 0 --embedding-size 6",
            )
            message = "expected the same kind of input"
        case "heads":
            rec, message = f"a={sets[0]} b={sets[1]}", "for a run with one head"
        case "nothing":
            given, message = tmp_path, "--compatible-with: .* no complete checkpoint"
    with pytest.raises(ValueError, match=message):
        train_here(tmp_path / "run", f"--rec {rec} {flags} --compatible-with {given}")
