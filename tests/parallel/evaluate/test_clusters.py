"""Clusters that real ranks find equal those of one process, to the bit."""

import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.embedding import clusters
from partial_fc.embedding.clusters import Clusters, KMeans
from partial_fc.verbs.data.cluster import ClusterOptions, cluster

CPU = torch.device("cpu")
N, D, C = 333, 13, 25


@pytest.fixture
def row_ND():
    return np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


@pytest.mark.parametrize("block", [32, 512])  # of one block some ranks have none
def test_equal_to_the_last_bit(world, monkeypatch, row_ND, block):
    monkeypatch.setattr(clusters, "BLOCK", block)
    results = []
    for some in (SingleWorld(), world):
        k_means = KMeans(row_ND, some, CPU)
        centre_CD = k_means.start(C, seed=3)
        centre_CD[3] = centre_CD[4]  # an empty cluster
        seen = [Clusters(centre_CD, np.full(N, -1))]
        for _ in range(5):
            seen.append(k_means.iterate(seen[-1]))
        results.append((seen, [class_BK for _, class_BK, _ in k_means.nearest(seen[-1].centre_CD, 3)]))
    (alone, labels), (together, labels_too) = results
    assert [now.reseeded for now in alone][1] > 0
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.centre_CD, other.centre_CD)
        np.testing.assert_array_equal(one.label_N, other.label_N)
        assert one[2:] == other[2:]
    np.testing.assert_array_equal(np.concatenate(labels), np.concatenate(labels_too))


def test_one_process_begins_and_all_go_on(world, tmp_path, row_ND):
    """Each rank has a disk of its own; rank 0's counts."""
    np.save(tmp_path / "x.npy", row_ND)

    def run(name, on, iterations):
        path, out = tmp_path / "x.npy", tmp_path / name
        cluster(ClusterOptions(embeddings=path, classes=C, labels=2, out=out, iterations=iterations), on, CPU)

    run("alone", SingleWorld(), 4)
    if world.rank == 0:
        run("together", SingleWorld(), 2)
    run("together", world, 4)
    for name in ("centres.npy", "vectors.labels.npy", "vectors.npy") if world.rank == 0 else ():
        assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert (tmp_path / "together").exists() == (world.rank == 0)


def test_a_bad_vector_is_named_on_all(world, tmp_path, row_ND):
    row_ND[7] = 0
    np.save(tmp_path / "x.npy", row_ND)
    with pytest.raises(ValueError, match=r"x\.npy, row 7: only zeros"):
        cluster(ClusterOptions(embeddings=tmp_path / "x.npy", classes=C, out=tmp_path / "out"), world, CPU)
    assert world.all_reduce(torch.ones(1), name="test/in_step").item() == world.size
