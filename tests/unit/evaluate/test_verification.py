"""Against slow, direct versions of the published protocol, and for several ranks against one."""

import math

import cv2
import numpy as np
import pytest
import torch

from partial_fc.comm import SingleWorld
from partial_fc.data.pairs import read_pairs, write_pairs
from partial_fc.evaluate.roc import Roc
from partial_fc.evaluate.verification import Verification, fold_accuracy, wilson_interval
from tests.unit.thread_world import in_world

SIZE = 12


# The protocol as its description reads: a loop over folds and thresholds, no cleverness.


def slow_accuracy(distances, same):
    n = len(same)
    sizes = [n // 10 + (1 if fold < n % 10 else 0) for fold in range(10)]
    accuracies = []
    start = 0
    for size in sizes:
        test = range(start, start + size)
        train = [i for i in range(n) if i not in test]
        best_threshold, best = None, -1
        for threshold in np.arange(0, 4, 0.01):
            correct = ((distances[train] < threshold) == same[train]).sum()
            if correct > best:
                best_threshold, best = threshold, correct
        accuracies.append(sum((distances[i] < best_threshold) == same[i] for i in test) / size)
        start += size
    return np.mean(accuracies), np.std(accuracies)


def slow_tar_at(distances, same, far):
    best = 0.0
    for threshold in distances:
        accepted = distances <= threshold
        if (accepted & ~same).sum() / (~same).sum() <= far:
            best = max(best, (accepted & same).sum() / same.sum())
    return best


def slow_distances(images, embed, flip):
    unit, norms = [], []
    for image in images:
        tensor = torch.from_numpy(image).permute(2, 0, 1)[None]
        views = [tensor, tensor.flip(3)] if flip else [tensor]
        feats = [embed(view).double()[0] for view in views]
        norms += [float(feat.norm()) for feat in feats]
        total = sum(feats)
        unit.append(total / total.norm())
    distances = [float((a - b).square().sum()) for a, b in zip(unit[0::2], unit[1::2], strict=True)]
    return np.array(distances), np.mean(norms)


# A set of pairs and a network.


def make_set(path, num_pairs, seed=0):
    """Genuine pairs are noisy copies. PNG, so that the bytes decode to exactly these images (RGB)."""
    rng = np.random.default_rng(seed)
    same = rng.random(num_pairs) < 0.5
    same[:2] = True, False
    images, encoded = [], []
    for is_same in same:
        first = rng.integers(0, 256, (SIZE, SIZE, 3))
        second = first + rng.normal(0, 150, first.shape) if is_same else rng.integers(0, 256, first.shape)
        for image in (first, second):
            image = image.clip(0, 255).astype(np.uint8)
            images.append(image)
            encoded.append(cv2.imencode(".png", image[:, :, ::-1])[1].tobytes())
    write_pairs(path, encoded, same.tolist())
    return images, same


@pytest.fixture
def embed():
    weight = torch.randn(3 * SIZE * SIZE, 5, generator=torch.Generator().manual_seed(1))

    def network(image_I3HW):
        assert image_I3HW.dtype == torch.uint8
        assert image_I3HW.shape[1:] == (3, SIZE, SIZE)
        return (image_I3HW.flatten(1).float() / 128 - 1) @ weight

    return network


def errors_of_three_ranks(path, embed, **options) -> list[str]:
    def work(world):
        with pytest.raises(ValueError) as error:
            list(Verification(path, SIZE, 8, **options).run(embed, world))
        return str(error.value)

    return in_world(3, work)


# Numerics


@pytest.mark.parametrize("num_pairs", [10, 11, 19, 57, 203])
@pytest.mark.parametrize("seed", [0, 1])
def test_fold_accuracy_equals_the_loops(num_pairs, seed):
    rng = np.random.default_rng(seed)
    same = rng.random(num_pairs) < 0.4
    distances = np.clip(rng.normal(np.where(same, 1.0, 1.6), 0.4), 0, 4)
    distances[::3] = np.arange(0, 4, 0.01)[(distances[::3] * 100).astype(int) % 400]  # exactly on a threshold
    accuracy = fold_accuracy(distances, same)
    assert (accuracy.mean, accuracy.std) == pytest.approx(slow_accuracy(distances, same), abs=1e-15)
    assert accuracy.low < accuracy.mean < accuracy.high or accuracy.mean in (0, 1)


@pytest.mark.parametrize("seed", range(4))
def test_roc_is_exact(seed):
    rng = np.random.default_rng(seed)
    same = rng.random(150) < 0.5
    distances = np.round(rng.normal(np.where(same, 1.0, 1.5), 0.3).clip(0, 4), 2)  # many ties
    roc = Roc.from_distances(distances, same, 0.5)
    assert len(roc.far) == len(np.unique(distances)) + 1
    for far, tar, threshold in zip(roc.far, roc.tar, roc.threshold, strict=True):
        accepted = distances <= threshold
        assert far == (accepted & ~same).sum() / (~same).sum()
        assert tar == (accepted & same).sum() / same.sum()
    assert (roc.far[-1], roc.tar[-1]) == (1.0, 1.0)
    for far in (0.02, 0.1, 0.35, 1.0):
        assert roc.tar_at(far) == slow_tar_at(distances, same, far)
    assert roc.tar_at(0.0) == slow_tar_at(distances, same, 0.0)


def test_wilson_interval():
    # Values of the closed form, worked out by hand: 50 of 100, and 10 of 10 (lower bound n / (n + z^2)).
    assert wilson_interval(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    low, high = wilson_interval(1.0, 10)
    assert low == pytest.approx(10 / (10 + 1.959964**2))
    assert high == pytest.approx(1.0)


# The whole evaluation


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize(("num_pairs", "batch_size"), [(10, 64), (33, 7), (120, 16)])
def test_equals_the_description(tmp_path, embed, num_pairs, batch_size, flip):
    images, same = make_set(tmp_path / "unseen.bin", num_pairs)
    distances, xnorm = slow_distances(images, embed, flip)
    mean, std = slow_accuracy(distances, same)
    verification = Verification(tmp_path / "unseen.bin", SIZE, batch_size, flip=flip)
    result = dict(verification.run(embed, SingleWorld()))
    assert result["unseen/accuracy"] == pytest.approx(mean, abs=1e-12)
    assert result["unseen/accuracy_std"] == pytest.approx(std, abs=1e-12)
    assert result["unseen/accuracy_low"] < mean < result["unseen/accuracy_high"]
    assert result["unseen/xnorm"] == pytest.approx(xnorm, rel=1e-6)
    assert result["unseen/tar@far=0"] == slow_tar_at(distances, same, 0.0)
    assert math.isnan(result["unseen/tar@far=1e-3"])  # fewer than 1,000 impostors
    assert math.isnan(result["unseen/tar@far=1e-4"])
    assert verification.roc.accuracy == result["unseen/accuracy"]
    assert verification.roc.tar_at(0.2) == slow_tar_at(distances, same, 0.2)
    assert 0.5 < mean < 1.0  # the set is neither hopeless nor trivial, so that mistakes would show


def test_one_collective_and_no_gradients(tmp_path, embed):
    make_set(tmp_path / "set.bin", 21)
    world = SingleWorld()

    def watched(image):
        assert not torch.is_grad_enabled()
        return embed(image)

    list(Verification(tmp_path / "set.bin", SIZE, 8).run(watched, world))
    assert world.traffic.calls == {"evaluate/set": 1}
    assert world.traffic.num_bytes == {"evaluate/set": 8 * (5 + 1) * 2 * 21}


def test_an_image_of_several_pairs_is_computed_once(tmp_path, embed):
    """As in LFW, AgeDB and CFP; the same numbers as from the description, which knows nothing of it."""
    images, _ = make_set(tmp_path / "set.bin", 30)
    encoded, _ = read_pairs(tmp_path / "set.bin")
    chosen = np.random.default_rng(2).integers(0, 20, 2 * 25)
    same = np.arange(25) % 3 == 0
    write_pairs(tmp_path / "set.bin", [encoded[i] for i in chosen], same.tolist())
    seen = []

    def watched(image_I3HW):
        seen.extend(image.numpy().tobytes() for image in image_I3HW)
        return embed(image_I3HW)

    verification = Verification(tmp_path / "set.bin", SIZE, 8, flip=False)
    result = dict(verification.run(watched, SingleWorld()))
    assert len(seen) == len(set(seen)) == len(set(chosen.tolist()))
    distances, xnorm = slow_distances([images[i] for i in chosen], embed, False)
    np.testing.assert_allclose(verification.distance_N, distances, rtol=1e-6, atol=1e-6)
    assert result["set/accuracy"] == slow_accuracy(verification.distance_N, same)[0]
    assert result["set/xnorm"] == pytest.approx(xnorm, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_bad_embedding_is_an_error_on_every_rank(tmp_path, embed, bad):
    images, _ = make_set(tmp_path / "set.bin", 30)
    target = torch.from_numpy(images[2 * 17 + 1]).permute(2, 0, 1)

    def sick(image_I3HW):
        feat_ID = embed(image_I3HW)
        feat_ID[(image_I3HW == target).flatten(1).all(1)] = bad
        return feat_ID

    for error in errors_of_three_ranks(tmp_path / "set.bin", sick, flip=False):
        assert "set.bin: pair 17 of 30 (1 bad in all): an embedding" in error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no image", "no image that OpenCV can read"),
        (cv2.imencode(".png", np.zeros((4, 400)))[1].tobytes(), "image of 400 x 4 pixels"),
    ],
    ids=["rubbish", "narrow"],
)
def test_broken_image_is_an_error_on_every_rank(tmp_path, embed, content, words):
    make_set(tmp_path / "set.bin", 30)
    encoded, same = read_pairs(tmp_path / "set.bin")
    encoded[2 * 11] = content
    write_pairs(tmp_path / "set.bin", encoded, same.tolist())
    for error in errors_of_three_ranks(tmp_path / "set.bin", embed):
        assert f"set.bin: pair 11 of 30 (1 bad in all): image 22 cannot be used: {words}" in error


@pytest.mark.parametrize(
    ("num_pairs", "kinds", "message"),
    [(9, 2, r"set\.bin: 9 pairs; 10 folds"), (20, 1, r"set\.bin: all 20 pairs are of one kind")],
)
def test_sets_that_cannot_be_evaluated(tmp_path, num_pairs, kinds, message):
    make_set(tmp_path / "set.bin", num_pairs)
    encoded, same = read_pairs(tmp_path / "set.bin")
    write_pairs(tmp_path / "set.bin", encoded, same.tolist() if kinds == 2 else [True] * num_pairs)
    with pytest.raises(ValueError, match=message):
        Verification(tmp_path / "set.bin", SIZE, 8)
