"""Recipe `face` with several labels a sample: images and vectors, rules, several processes, bad input."""

from pathlib import Path

import numpy as np
import pytest

from partial_fc.data import open_source
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.train.record import first_batch
from tests.running import losses, result, train_here

C, D, K = 40, 24, 3
FLAGS = (
    "--network linear --embedding-size 24 --loss cosface --margins None --labels 3 --sample-rate 0.5 --lr 0.01 "
    "--lr-scheduler constant --warmup-steps 0 --weight-decay 0 --precision fp64"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Vectors that are sums of one to three classes' directions: train.npz, test.npz."""
    folder = tmp_path_factory.mktemp("labels")
    rng = np.random.default_rng(0)
    direction_CD = rng.normal(size=(C, D))
    for name, count in (("train", 480), ("test", 60)):
        label_NK = np.array([rng.permutation(C)[:K] for _ in range(count)])
        label_NK[np.arange(K) >= rng.integers(1, K + 1, (count, 1))] = -1
        part_NKD = direction_CD[label_NK] * (label_NK >= 0)[:, :, None]
        row_ND = part_NKD.sum(axis=1) + 0.1 * rng.normal(size=(count, D))
        np.savez(folder / f"{name}.npz", embeddings=row_ND, labels=label_NK)
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
