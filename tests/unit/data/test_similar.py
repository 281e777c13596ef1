"""Classes that may be one under two numbers: as a loop over all pairs finds them."""

import numpy as np
import pytest

from partial_fc.data.check import similar
from partial_fc.data.check.similar import check_similar
from partial_fc.data.vectors import Vectors
from partial_fc.head.telemetry import SIMILAR
from partial_fc.verbs.doctor.data import DataOptions, doctor_data

D = 8


@pytest.mark.parametrize("most", [40, 9])
def test_shares_and_pairs_are_those_of_a_loop(tmp_path, monkeypatch, most):
    monkeypatch.setattr(similar, "_AT_ONCE", 7)
    monkeypatch.setattr(similar, "MOST", most)
    rng = np.random.default_rng(0)
    centre_CD = rng.normal(size=(20, D))
    centre_CD[15:] = centre_CD[:5]  # five classes twice
    label_N = rng.integers(0, 20, 300)
    label_N[label_N == 7] = 8  # a number without vectors
    row_ND = centre_CD[label_N] + 0.3 * rng.normal(size=(300, D))
    row_ND = (row_ND / np.linalg.norm(row_ND, axis=1, keepdims=True)).astype(np.float32)
    for name, part in (("a", slice(0, 170)), ("b", slice(170, 300))):
        np.savez(tmp_path / f"{name}.npz", embeddings=row_ND[part], labels=label_N[part])
    parts = [Vectors(tmp_path / f"{name}.npz") for name in "ab"]
    (finding,) = check_similar(parts, label_N, "x", [f"n{c}" for c in range(20)])
    mean = {c: row_ND[label_N == c].mean(axis=0) for c in set(label_N.tolist())}
    mean = {c: m / np.linalg.norm(m) for c, m in mean.items()}
    nearest = {c: max((mean[c] @ m, other) for other, m in mean.items() if other != c) for c in mean}
    expected = {f"{c} (n{c})": f"{other} (n{other})" for c, (cosine, other) in nearest.items() if cosine > SIMILAR}
    found = {place["class"]: place["like"] for place in map(finding.describe, finding.places)}
    if most == 40:
        assert found == expected
        assert f"of 19 classes looked at, {len(expected) / 19:.1%}" in finding.what
    else:
        assert found.items() <= expected.items()
        assert len(found) == finding.count > 0


def test_doctor_tells_it_of_embeddings_only(tmp_path, capsys):
    row_ND = np.tile(np.eye(4, dtype=np.float32), (4, 1))
    label_N = np.arange(16) % 8  # 0 and 4, 1 and 5 ... are alike
    for scale, told in ((1, True), (3, False)):
        np.savez(tmp_path / "set.npz", embeddings=scale * row_ND, labels=label_N)
        doctor_data(DataOptions(tmp_path / "set.npz", bar=False))
        printed = capsys.readouterr().out
        assert ("classes-similar (8)" in printed) is told
