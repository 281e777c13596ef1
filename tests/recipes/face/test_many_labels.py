"""Recipe `face` with several labels a sample: images and vectors, rules, several processes, bad input."""

from pathlib import Path

import numpy as np
import pytest

from partial_fc.data import open_source
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.train.record import first_batch
from tests.running import endings, face, losses, result, same_tensors, several, train_here

C, D, K = 40, 24, 3
FLAGS = (
    "--network linear --embedding-size 24 --loss cosface --margins None --labels 3 --sample-rate 0.5 --lr 0.01 "
    "--lr-scheduler constant --warmup-steps 0 --weight-decay 0 --precision fp64"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Vectors that are sums of one to three classes' directions: train.npz, test.npz; a row of bad.npz has four."""
    folder = tmp_path_factory.mktemp("labels")
    rng = np.random.default_rng(0)
    direction_CD = rng.normal(size=(C, D))
    for name, count in (("train", 480), ("test", 60)):
        label_NK = np.array([rng.permutation(C)[:K] for _ in range(count)])
        label_NK[np.arange(K) >= rng.integers(1, K + 1, (count, 1))] = -1
        part_NKD = direction_CD[label_NK] * (label_NK >= 0)[:, :, None]
        row_ND = part_NKD.sum(axis=1) + 0.1 * rng.normal(size=(count, D))
        np.savez(folder / f"{name}.npz", embeddings=row_ND, labels=label_NK)
    label_N4 = np.pad(label_NK, ((0, 0), (0, 1)), constant_values=-1)
    label_N4[7] = [1, 2, 3, 4]
    np.savez(folder / "bad.npz", embeddings=row_ND, labels=label_N4)
    return folder


def train(data: Path, root: Path, flags: str) -> str:
    return train_here(root, f"--rec {data}/train.npz {FLAGS} {flags}")


@pytest.mark.parametrize("rule", ["mean-softmax", "own-out", "soft-target", "mlc", "mlcd --labels 2"])
def test_every_rule_learns(rule, data, tmp_path):
    name, *more = rule.split()
    if more:  # a vector with three labels is one too many
        with pytest.raises(ValueError, match=r"train\.npz, row \d+: 3 labels; expected 1 to 2"):
            train(data, tmp_path / "run", f"--rule {rule} --max-steps 2")
    train(
        data,
        tmp_path / "run",
        f"--rule {name} --hard-negatives 1 --max-steps 80 --batch-size 32 --precision fp32 --val-targets test",
    )
    found = losses(tmp_path / "run")
    assert found[-1] < 0.7 * found[0]
    values = result(tmp_path / "run")["evaluations"]
    assert values["test/rank1"] > 0.9
    assert values["test/rank5"] >= values["test/rank1"]


@pytest.mark.long
def test_processes_give_one_curve_and_resume_bit_by_bit(data, tmp_path):
    """In fp64, with drawn labels; a run of one process goes on with two. What cannot be trained on ends both ranks."""
    flags = "--rule own-out --labels-drawn 2 --accumulate 2 --max-steps"
    train(data, tmp_path / "one", f"{flags} 6 --batch-size 12")
    train(data, tmp_path / "begun", f"{flags} 3 --batch-size 12")
    assert losses(tmp_path / "begun") == losses(tmp_path / "one")[:3]
    runs = {"two": 6, "begun": 6, "parts": 3, "parts again": 6}
    given = [
        face(tmp_path / name.split()[0], f"--rec {data}/train.npz {FLAGS} {flags} {steps} --batch-size 6")
        for name, steps in runs.items()
    ]
    given += [
        face(tmp_path / f"bad-{check}", f"--rec {data}/bad.npz {FLAGS} --check-data {check} --batch-size 6")
        for check in ("quick", "off")
    ]
    printed = several(given, 2)
    for rank in range(2):
        *good, quick, off = endings(printed, rank)
        assert good == ["0"] * len(runs), printed[-6000:]
        assert "bad.npz, row 7: 4 labels; expected 1 to 3" in quick
        assert "bad.npz, row 7: 4 labels; expected 1 to 3" in off
    one = losses(tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(one, rel=1e-9)
    assert losses(tmp_path / "begun") == pytest.approx(one, rel=1e-9)
    assert losses(tmp_path / "parts") == losses(tmp_path / "two")
    assert same_tensors(*(tmp_path / name / "checkpoints/step-00000006" for name in ("two", "parts")))
    assert "step 1" not in (tmp_path / "bad-quick/logs/rank-0000.log").read_text()


@pytest.fixture(scope="module")
def records(glyphs, tmp_path_factory) -> Path:
    """The glyphs with two labels more: groups of ten and of forty."""
    source = open_source(glyphs)
    path = tmp_path_factory.mktemp("records") / "many.rec"
    with RecordWriter(path) as writer:
        for key, sample in enumerate(map(source.read, range(len(source)))):
            writer.write(key, pack([sample.label, 80 + sample.label // 10, 88 + sample.label // 40], sample.data))
    return path


def test_images_with_labels(records, tmp_path, monkeypatch):
    """... learn, start at imprinted centres, and are drawn with all their classes."""
    titles = []
    monkeypatch.setattr(first_batch.pictures, "write", lambda _, sheet: titles.append(sheet))
    monkeypatch.setattr(first_batch.pictures, "sheet", lambda rows, _: [tile.caption for tile in rows[0].tiles])
    common = f"--rec {records} --labels 3 --batch-size 16 --image-size 24 --max-steps"
    log = train_here(tmp_path / "run", f"{common} 30 --rule mlc")
    assert "90 classes" in log
    found = losses(tmp_path / "run")
    assert found[-1] < found[0]
    ((first, *_),) = titles
    numbers = [int(number) for number in first[0].split()[1:]]
    assert numbers[1:] == [80 + numbers[0] // 10, 88 + numbers[0] // 40]
    log = train_here(tmp_path / "imprinted", f"{common} 3 --start-centres imprint")
    assert "the centres of 90 classes are means of" in log
