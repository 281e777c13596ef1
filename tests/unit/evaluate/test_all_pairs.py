"""All pairs against a plain computation with whole numbers, and the ROC of the same pairs."""

import numpy as np
import pytest
import torch

from partial_fc.evaluate import all_pairs as module
from partial_fc.evaluate.all_pairs import AllPairs, all_pairs
from partial_fc.evaluate.roc import Roc
from tests.unit.thread_world import in_world

CPU = torch.device("cpu")
RATES = ("0.5", "1e-1", "1e-2", "1e-3", "1e-5", "0")


def labelled(kind):
    """150 images of classes of 1 to 9, mixed: all different, or of 30 vectors only, so that most scores are equal."""
    rng = np.random.default_rng(3)
    label_N = rng.permutation(np.repeat(np.arange(30) * 7, np.arange(30) % 9 + 1)[:150])
    row_ND = np.random.default_rng(4).normal(size=(300, 20))[label_N] + 1.2 * rng.normal(size=(len(label_N), 20))
    if kind == "ties":
        row_ND = row_ND[rng.integers(0, 30, len(row_ND))]
        row_ND[:20] = row_ND[0]  # the bound of the smallest rates is 1, the highest score
    return (row_ND / np.linalg.norm(row_ND, axis=1, keepdims=True)).astype(np.float32), label_N


def of_ranks(size, *given, **more):
    found = in_world(size, lambda world: all_pairs(*given, world, CPU, name="t", **more))
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("kind", ["different", "ties"])
def test_equals_the_roc_of_all_pairs_for_any_blocks_and_ranks(kind, monkeypatch):
    row_ND, label_N = labelled(kind)
    whole_ND = np.round(row_ND.astype(np.float64) * 2**26).astype(np.int64)
    distance_NN = ((whole_ND[:, None] - whole_ND) ** 2).sum(2) * 2.0**-52
    once = np.triu_indices(len(label_N), 1)
    roc = Roc.from_distances(distance_NN[once], (label_N[:, None] == label_N)[once], None)
    for block in (16, 7, 1000):
        monkeypatch.setattr(module, "_BLOCK", block)
        for size in (1, 2, 3):
            found = of_ranks(size, row_ND, label_N, rates=RATES)
            assert (found.num_genuine, found.num_impostors) == (roc.num_genuine, roc.num_impostors)
            assert [*found.at_far] == [far for far in RATES if far != "1e-5"]  # some 10,000 impostors cannot tell
            for far, at in found.at_far.items():
                expected = roc.threshold_at(float(far))
                assert (at.tar, at.far) == (expected.tar, expected.far)
                assert (at.cosine, at.distance, at.accuracy) == pytest.approx(
                    (expected.cosine, expected.distance, expected.accuracy), abs=1e-15
                )
    tars = [at.tar for at in found.at_far.values()]
    assert tars == sorted(tars, reverse=True)
    assert tars[0] < 1
    assert (tars[-1] == 0) == (kind == "ties")


def test_scores_have_the_same_bits_for_any_blocks_and_threads(monkeypatch):
    rng = np.random.default_rng(5)
    row_ND = rng.normal(size=(90, 512))
    row_ND = (row_ND / np.linalg.norm(row_ND, axis=1, keepdims=True)).astype(np.float32)
    row_ND[7] = row_ND[8]
    whole_ND = np.round(row_ND.astype(np.float64) * 2**26).astype(np.int64)
    expected_NN = (2**53 - ((whole_ND[:, None] - whole_ND) ** 2).sum(2)) * 2.0**-53
    assert expected_NN[7, 8] == 1
    pairs = module._Pairs(row_ND, row_ND, np.arange(90), np.arange(90), CPU)
    for block in (90, 32):
        monkeypatch.setattr(module, "_BLOCK", block)
        for i in range(0, 90, block):
            score = pairs.scores(0, i).numpy()
            assert np.array_equal(score, expected_NN[:block, i : i + block])


def test_too_few_impostors_for_any_rate():
    found = of_ranks(2, np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1]))
    assert found == AllPairs(2, 4, {})


@pytest.mark.parametrize(
    ("label_N", "words"),
    [([5, 5, 5, 5], "t: 4 images, all of one class"), ([5, 6, 7, 8], "t: 4 images, none of the same class as another")],
)
def test_what_cannot_be_measured_is_refused(label_N, words):
    with pytest.raises(ValueError, match=words):
        of_ranks(1, np.eye(4, dtype=np.float32), np.array(label_N))
