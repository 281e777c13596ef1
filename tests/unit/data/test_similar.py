"""Classes that may be one under two numbers, and vectors unlike their class: as a loop over all pairs finds them."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from partial_fc.data.check import similar
from partial_fc.data.check.similar import check_similar
from partial_fc.data.recordio import RecordWriter, pack
from partial_fc.data.sets.joined import open_sets
from partial_fc.data.vectors import Vectors
from partial_fc.verbs.doctor.data import DataOptions, doctor_data
from tests.house.test_library import programs

D = 8
COS_75 = 0.25881904510252074


def far_of(row_ND, label_N) -> set[int]:
    mean = {c: np.nanmean(row_ND[label_N == c], axis=0) for c in set(label_N.tolist()) - {-1}}
    return {
        i for i, c in enumerate(label_N.tolist()) if c >= 0 and row_ND[i] @ mean[c] / np.linalg.norm(mean[c]) < COS_75
    }


def expected(row_ND, label_N) -> dict[int, int]:
    """By all pairs of different vectors."""
    row_ND = row_ND.copy()
    row_ND[[*far_of(row_ND, label_N)]] = np.nan
    row_ND[label_N < 0] = np.nan
    cosine, num = np.zeros((20, 20)), np.zeros((20, 20))
    for i, j in itertools.permutations(np.flatnonzero(np.isfinite(row_ND).all(axis=1)), 2):
        cosine[label_N[i], label_N[j]] += row_ND[i] @ row_ND[j]
        num[label_N[i], label_N[j]] += 1
    same = np.eye(20, dtype=bool)
    pooled, elsewhere = (cosine[which].sum() / num[which].sum() for which in (same, ~same))
    mean_CD = np.array([np.nanmean([*row_ND[label_N == c], np.full(D, np.nan)], axis=0) for c in range(20)])
    found = {}
    for c in np.flatnonzero(np.isfinite(mean_CD).all(axis=1)):
        direction = np.nan_to_num(mean_CD @ mean_CD[c] / np.linalg.norm(mean_CD, axis=1), nan=-1)
        direction[c] = -1
        other = int(direction.argmax())
        within = (cosine[c, c] + cosine[other, other] + 10 * pooled) / (num[c, c] + num[other, other] + 10)
        if cosine[c, other] / num[c, other] - elsewhere > 0.95 * (within - elsewhere):
            found[int(c)] = other
    return found


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize(("most", "products"), [(40, 0), (9, 0), (9, 20 * 20 * D)])
def test_shares_and_pairs_are_those_of_a_loop(tmp_path, monkeypatch, most, products):
    monkeypatch.setattr(similar, "_COSINES", 7 * 19)
    monkeypatch.setattr(similar, "MOST", most)
    monkeypatch.setattr(similar, "PRODUCTS", products)
    rng = np.random.default_rng(0)
    centre_CD = rng.normal(size=(20, D))
    centre_CD[15:] = centre_CD[:5]  # five classes twice
    label_N = rng.integers(0, 20, 300)
    label_N[label_N == 7] = 8  # a number without vectors
    label_N[np.flatnonzero(label_N == 3)[1:]] = 9  # one with a single vector
    row_ND = centre_CD[label_N] + 0.5 * rng.normal(size=(300, D))
    row_ND = (row_ND / np.linalg.norm(row_ND, axis=1, keepdims=True)).astype(np.float32)
    row_ND[np.flatnonzero(label_N == 4)[0]] = np.nan
    wrong = rng.choice(np.flatnonzero(label_N != 3), 20, replace=False)
    label_N[wrong] = rng.integers(10, 20, 20)
    for name, part in (("a", slice(0, 170)), ("b", slice(170, 300))):
        np.savez(tmp_path / f"{name}.npz", embeddings=row_ND[part], labels=label_N[part])
    parts = [Vectors(tmp_path / f"{name}.npz") for name in "ab"]
    label_N[wrong[0]] = -1
    far, finding = check_similar(parts, label_N, lambda i: {"at": i}, "x", [f"n{c}" for c in range(20)])
    assert {place["at"] for place in map(far.describe, far.places)} == far_of(row_ND, label_N)
    assert f"{far.count / 300:.1%} of the vectors" in far.what
    assert (far.severity, finding.severity) == ("warning", "warning")
    named = {f"{c} (n{c})": f"{other} (n{other})" for c, other in expected(row_ND, label_N).items()}
    assert {f"{c} (n{c})" for c in (0, 1, 2, 15, 16, 17)} <= named.keys()
    found = {place["class"]: place["like"] for place in map(finding.describe, finding.places)}
    if most == 40 or products:
        assert found == named
        assert finding.what.startswith(f"{len(named) / 19:.1%} of 19 classes")
    else:
        assert found.items() <= named.items()
        assert len(found) == finding.count > 0


def test_doctor_tells_it_of_embeddings_only(tmp_path, capsys):
    row_ND = np.tile(np.eye(4, dtype=np.float32), (4, 1))
    label_N = np.arange(16) % 8  # 0 and 4, 1 and 5 ... are alike
    for scale, told in ((1, True), (3, False)):
        np.savez(tmp_path / "set.npz", embeddings=scale * row_ND, labels=label_N)
        doctor_data(DataOptions(tmp_path / "set.npz", bar=False))
        printed = capsys.readouterr().out
        assert ("classes-similar (8)" in printed) is told


def test_classes_that_are_one_are_joined_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    label_N = np.repeat(np.arange(8), 6)
    row_ND = np.eye(D, dtype=np.float32)[label_N % 6] + 0.05 * rng.normal(size=(48, D)).astype(np.float32)
    row_ND[5] = -row_ND[5]
    row_ND /= np.linalg.norm(row_ND, axis=1, keepdims=True)
    np.savez("seen.npz", embeddings=row_ND, labels=label_N, keys=[f"image {i}" for i in range(48)])
    Path("faces").mkdir()
    with RecordWriter("faces/train.rec") as records:
        for key, label in enumerate(label_N):
            records.write(key, pack(label, b"image"))
    Path("faces/classes.txt").write_text("".join(f"{name}\n" for name in "abcdefgh"))
    doctor_data(DataOptions(Path("seen.npz"), report=Path("seen.json"), bar=False))
    found = {one["key"]: one["places"] for one in json.loads(Path("seen.json").read_text())["findings"]}
    assert found["vectors-far"] == [{"file": "seen.npz, row 5 (image 5)", "class": 0}]
    (program,) = programs("data.md")
    exec(compile(program, "data.md", "exec"), {})
    joined = open_sets([Path("faces")], shared_classes=True)
    assert joined.class_names() == [*"abcdef"]
    assert joined.labels().tolist() == [*label_N % 6]
