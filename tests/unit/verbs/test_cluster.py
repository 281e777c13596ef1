"""`partial-fc cluster`: its result is that of spherical k-means written down in NumPy, resumed or not."""

import numpy as np
import pytest
import torch

from partial_fc import cli
from partial_fc.comm import SingleWorld
from partial_fc.data.recordio import RecordReader, RecordSource, RecordWriter, pack
from partial_fc.data.vectors import Vectors
from partial_fc.embedding import clusters
from partial_fc.embedding.clusters import Clusters, KMeans

N, D, C = 700, 19, 30
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    monkeypatch.setattr(clusters, "BLOCK", 128)


def rows(seed=0, count=N):
    random = np.random.default_rng(seed)
    row_ND = random.normal(size=(C, D))[random.integers(0, C, count)] + 0.6 * random.normal(size=(count, D))
    row_ND *= random.uniform(0.1, 10, (count, 1))  # of any length, also where squares are beyond float32
    row_ND[3] *= 1e-25
    row_ND[4] *= 1e25
    return row_ND.astype(np.float32)


def unit(x):
    return x / np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)


def by_hand(row_ND, centre_CD, iterations):
    """-> (labels, centres, mean cosine, empty clusters of each iteration)."""
    row_ND, label_N, empties = unit(row_ND), None, []
    for _ in range(iterations):
        cosine_NC = row_ND @ centre_CD.T
        label_N, best_N = cosine_NC.argmax(axis=1), cosine_NC.max(axis=1)
        empty = [c for c in range(len(centre_CD)) if not (label_N == c).any()]
        for c in empty:
            alone = np.array([(label_N == label).sum() == 1 for label in label_N])
            label_N[np.where(alone, 2, best_N).argmin()] = c
        centre_CD = unit(np.stack([row_ND[label_N == c].sum(axis=0) for c in range(len(centre_CD))]))
        empties.append(len(empty))
    return label_N, centre_CD, best_N.mean(), empties


def run(k_means, centre_CD, iterations):
    now, seen = Clusters(centre_CD, np.full(len(k_means.row_ND), -1)), []
    for _ in range(iterations):
        now = k_means.iterate(now)
        seen.append(now.reseeded)
    return now, seen


@pytest.mark.parametrize("copies", [0, 5])
def test_equals_k_means_by_hand(copies):
    """copies: start centres that equal the first one, and so get no row."""
    row_ND = rows()
    start_CD = unit(row_ND[:C])
    start_CD[1 : 1 + copies] = start_CD[0]
    label_N, centre_CD, cosine, empties = by_hand(row_ND, start_CD, 6)
    now, seen = run(KMeans(row_ND, SingleWorld(), CPU), torch.from_numpy(start_CD).float(), 6)
    assert seen == empties
    assert seen[0] == copies
    np.testing.assert_array_equal(now.label_N, label_N)
    np.testing.assert_allclose(now.centre_CD, centre_CD, atol=2e-6)
    assert now.cosine == pytest.approx(cosine, abs=1e-6)


def test_stops_where_nothing_moves_also_with_fewer_directions_than_clusters():
    row_ND = np.repeat(np.eye(3, D, dtype=np.float32), 4, axis=0)
    k_means = KMeans(row_ND, SingleWorld(), CPU)
    now, _ = run(k_means, k_means.start(5, seed=0), 4)
    assert (now.moved, now.cosine) == (0, 1.0)
    assert np.bincount(now.label_N, minlength=5).min() == 1
    assert np.isfinite(now.centre_CD.numpy()).all()


def test_start_centres_lie_in_different_places():
    """Eight tight groups: eight rows by chance alone are of eight groups once in 400 times."""
    random = np.random.default_rng(1)
    row_ND = np.repeat(unit(random.normal(size=(8, D))), 90, axis=0) + 1e-3 * random.normal(size=(720, D))
    start_CD = KMeans(row_ND, SingleWorld(), CPU).start(8, seed=0)
    assert sorted((unit(row_ND) @ start_CD.double().numpy().T).argmax(axis=0) // 90) == list(range(8))
    many_CD = KMeans(row_ND, SingleWorld(), CPU).start(720, seed=0).numpy()
    assert len(np.unique(many_CD, axis=0)) == 720


# ---- the command


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(words):
        status = cli.run("cluster", words.split())
        return status or 0, capsys.readouterr()

    return run


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_writes_what_can_be_trained_on(command, tmp_path):
    row_ND = rows()
    np.save(tmp_path / "x.npy", row_ND)
    status, said = command("x.npy --classes 30 --labels 4 --out four --iterations 5")
    assert (status, said.err) == (0, "")
    assert "iteration 1 of 5: 100.00% moved" in said.out
    centre_CD, label_NK = np.load("four/centres.npy"), np.load("four/vectors.labels.npy")
    assert (centre_CD.dtype, label_NK.dtype, label_NK.shape) == (np.float32, np.int64, (N, 4))
    np.testing.assert_allclose(np.linalg.norm(centre_CD, axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(label_NK, (unit(row_ND) @ centre_CD.T).argsort(axis=1)[:, :-5:-1])
    assert command("x.npy --classes 30 --out one --iterations 5")[0] == 0
    source = Vectors(tmp_path / "one/vectors.npy")
    np.testing.assert_array_equal(source.labels(), label_NK[:, 0])
    np.testing.assert_allclose(source.row_ND, unit(row_ND), atol=1e-6)
    # From centres of one's own; the labels in a file do not count.
    np.savez(tmp_path / "x.npz", embeddings=row_ND, labels=np.full(N, -7))
    assert command("x.npz --classes 30 --out again --start-centres one/centres.npy --iterations 1")[0] == 0
    np.testing.assert_allclose(np.load("again/centres.npy"), by_hand(row_ND, centre_CD, 1)[1], atol=2e-6)


def test_resumed_equals_uninterrupted(command, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", rows())
    words = "x.npy --classes 30 --labels 3 --iterations 7 --out"
    assert command(f"{words} whole")[0] == 0
    means = KMeans.means

    def interrupted(*given):
        if (tmp_path / "parts/clusters.safetensors").exists():
            raise OSError("the plug was pulled")
        return means(*given)

    monkeypatch.setattr(KMeans, "means", interrupted)
    assert command(f"{words} parts")[0] == 1
    monkeypatch.setattr(KMeans, "means", means)
    status, said = command(f"{words} parts")
    assert status == 0
    assert "resumes after iteration 1\niteration 2 of 7" in said.out
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    assert command(f"{words} parts")[0] == 0  # with nothing left to do
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    status, said = command("x.npy --classes 30 --iterations 3 --out parts")
    assert status == 1
    assert "iteration 7, beyond --iterations 3" in said.err


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        ("x.npy --classes 701", 1, "x.npy: 700 vectors, fewer than --classes 701"),
        ("x.npy --classes 3 --labels 4", 2, "--labels 4 with --classes 3"),
        ("zero.npz --classes 3", 1, "zero.npz, row 5: only zeros"),
        ("x.npy --classes 3 --start-centres x.npy", 1, "x.npy: float32 (700, 19); expected floating (3, 19)"),
        ("x.npy --classes 3 --start-centres bad.npy", 1, "bad.npy, row 2: NaN or Inf, or only zeros"),
        ("x.npy --classes 3 --out .", 1, "--out . holds something else"),
        ("x.npy --classes 4 --out done", 1, "clusters.safetensors is of another job (--classes: 3 there, 4 here)"),
        ("other.npy --classes 3 --out done", 1, "another job (checksum of some vectors: "),
    ],
)
def test_bad_input(command, tmp_path, words, status, error):
    row_ND = rows()
    np.save(tmp_path / "x.npy", row_ND)
    np.save(tmp_path / "other.npy", rows(seed=1))
    np.save(tmp_path / "bad.npy", row_ND[:3] * [[1], [1], [0]])
    if "done" in words:
        assert command("x.npy --classes 3 --out done --iterations 1")[0] == 0
    row_ND[5] = 0
    np.savez(tmp_path / "zero.npz", embeddings=row_ND)
    found, said = command(words if "--out" in words else f"{words} --out new")
    assert found == status
    assert error in said.err
    assert not (tmp_path / "new").exists()


def test_labels_in_a_copy_of_the_records(command, tmp_path):
    row_ND = rows(count=12)
    with RecordWriter(tmp_path / "a.rec") as writer:
        for key in range(1, 13):
            writer.write(key, pack(5.0, b"image %d" % key, id=key))
    np.savez(tmp_path / "x.npz", embeddings=row_ND, keys=np.arange(1, 13).astype(str))
    words = "--classes 5 --labels 3 --records a.rec --out"
    assert command(f"x.npz {words} out")[0] == 0
    label_NK = np.load("out/vectors.labels.npy")
    reader = RecordReader(tmp_path / "out/train.rec")
    for key in range(1, 13):
        header, content = reader.read_sample(key)
        assert (header.flag, header.id, content) == (3, key, b"image %d" % key)
        assert header.label.tolist() == label_NK[key - 1].tolist()
    assert RecordSource(tmp_path / "out").num_classes == 5
    assert not (tmp_path / "out/vectors.npy").exists()
    np.savez(tmp_path / "y.npz", embeddings=row_ND, keys=np.arange(12).astype(str))
    status, said = command(f"y.npz {words} other")
    assert status == 1
    assert "y.npz, row 0: its key is not that of image 0, a.rec, key 1" in said.err
    np.save(tmp_path / "z.npy", row_ND[:9])
    assert "9 vectors" in command(f"z.npy {words} other")[1].err
