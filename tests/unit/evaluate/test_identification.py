"""1:N against slow, direct versions of the definitions."""

import math

import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.data.vectors import Vectors
from partial_fc.evaluate import identification
from partial_fc.evaluate.identification import search
from partial_fc.verbs.model.embed import unit_rows
from partial_fc.verbs.model.search import Labelled, common_labels

CPU = torch.device("cpu")


def vectors(label_N, num_classes, spread, seed):
    rng = np.random.default_rng(seed)
    centre_CD = np.random.default_rng(9).normal(size=(num_classes, 6))
    row_ND = centre_CD[label_N] + spread * rng.normal(size=(len(label_N), 6))
    return (row_ND / np.linalg.norm(row_ND, axis=1, keepdims=True)).astype(np.float32)


def slow(probe_PD, probe_label, gallery_GD, gallery_label, is_gallery):
    """(rank, average precision at R, best cosine) of each probe; None without a mate."""
    results = []
    for p, row in enumerate(probe_PD):
        others = [g for g in range(len(gallery_label)) if not (is_gallery and g == p)]
        cosines = {g: float(row.astype(np.float64) @ gallery_GD[g].astype(np.float64)) for g in others}
        nearest = sorted(others, key=lambda g: -cosines[g])
        mates = [g for g in others if gallery_label[g] == probe_label[p]]
        if not mates:
            results.append((None, None, cosines[nearest[0]]))
            continue
        best = max(cosines[g] for g in mates)
        nearer = {gallery_label[g] for g in others if cosines[g] > best}
        right = [gallery_label[g] == probe_label[p] for g in nearest[: len(mates)]]
        precision = sum(sum(right[: i + 1]) / (i + 1) for i in range(len(mates)) if right[i]) / len(mates)
        results.append((1 + len(nearer), precision, cosines[nearest[0]]))
    return results


@pytest.mark.parametrize("is_gallery", [False, True])
def test_equals_the_definitions(monkeypatch, is_gallery):
    """Gallery and probes in several blocks, classes of 1 to 9 images, some probes without a mate."""
    monkeypatch.setattr(identification, "_PROBES_AT_ONCE", 16)
    monkeypatch.setattr(identification, "_GALLERY_AT_ONCE", 32)
    gallery_label = np.repeat(np.arange(20) * 7, np.arange(20) % 9 + 1)  # numbers with gaps
    gallery = vectors(gallery_label // 7, 30, 0.8, 1)
    if is_gallery:
        probe, probe_label = gallery, gallery_label
    else:
        probe_label = np.repeat(np.arange(30) * 7, 3)
        probe = vectors(probe_label // 7, 30, 0.8, 2)
    found = search(probe, probe_label, gallery, gallery_label, SingleWorld(), CPU, name="t", is_gallery=is_gallery)
    values = dict(found.values())
    reference = slow(probe, probe_label, gallery, gallery_label, is_gallery)
    mated = [r for r in reference if r[0] is not None]
    strangers = sorted((r[2] for r in reference if r[0] is None), reverse=True)
    assert found.has_mate_P.tolist() == [r[0] is not None for r in reference]
    assert found.rank_P.tolist() == [r[0] if r[0] and r[0] <= 5 else 0 for r in reference]
    assert values["rank1"] == values["precision@1"] == np.mean([r[0] == 1 for r in mated])
    assert values["rank5"] == np.mean([r[0] <= 5 for r in mated])
    assert values["map@r"] == pytest.approx(np.mean([r[1] for r in mated]))
    assert 0.2 < values["map@r"] < values["rank1"] < values["rank5"] < 1  # neither hopeless nor trivial
    if is_gallery:
        assert math.isnan(values["tpir@fpir=1e-1"])  # fewer than 10 are alone in their class
    else:
        assert len(strangers) == 30
        threshold = strangers[3]  # three of thirty may be accepted
        assert values["threshold@fpir=1e-1"] == pytest.approx(threshold)
        assert values["tpir@fpir=1e-1"] == np.mean([r[0] == 1 and r[2] > threshold + 1e-9 for r in mated])
        assert math.isnan(values["tpir@fpir=1e-2"])


def test_a_gallery_without_mates():
    row_ND = np.eye(4, dtype=np.float32)
    with pytest.raises(ValueError, match=r"no probe has a class of the gallery \(4 probes, 4 classes"):
        search(row_ND, np.arange(4) + 4, row_ND, np.arange(4), SingleWorld(), CPU, name="t")
    with pytest.raises(ValueError, match="every class has one image only"):
        search(row_ND, np.arange(4), row_ND, np.arange(4), SingleWorld(), CPU, name="t", is_gallery=True)


def test_classes_are_the_same_by_name():
    def labelled(labels, names):
        return Labelled("some", np.zeros((len(labels), 2), np.float32), np.array(labels), names, None)

    gallery, probe = common_labels(labelled([0, 1, 1], ["ann", "bob"]), labelled([0, 1, 2], ["bob", "cleo", "ann"]))
    assert (gallery[:, None] == probe).tolist() == [[False, False, True], [True, False, False], [True, False, False]]
    with pytest.raises(ValueError, match="numbers only"):
        common_labels(labelled([0], ["ann"]), labelled([0], None))


def test_an_npz_of_something_else(tmp_path):
    np.savez(tmp_path / "a.npz", embeddings=np.eye(3) * 2, labels=np.arange(3))
    with pytest.raises(ValueError, match=r"a\.npz, row 0: an embedding of length 2 \(3 such\); expected length 1"):
        unit_rows([Vectors(tmp_path / "a.npz")])
