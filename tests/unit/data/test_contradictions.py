"""Labels that contradict the embeddings: as loops over all images find them, in float64."""

import itertools
from collections import Counter

import numpy as np
import pytest

from partial_fc.data.check.contradictions import FEWEST, GAP, MARGIN, NEAREST, NEIGHBOURS, ONE, TWO, VOTES, find_changes

D, EACH, C = 24, 10, 30


def embeddings(seed: int, spread: float = 0.12):
    """Returns (rows, true classes) of C classes."""
    rng = np.random.default_rng(seed)
    row_ND = np.repeat(rng.normal(size=(C, D)) / D**0.5, EACH, axis=0) + spread * rng.normal(size=(C * EACH, D))
    return (row_ND / np.linalg.norm(row_ND, axis=1, keepdims=True)).astype(np.float32), np.arange(C * EACH) // EACH


def neighbours(row_ND):
    cosine_NN = row_ND @ row_ND.T
    np.fill_diagonal(cosine_NN, -2)
    return np.argsort(-cosine_NN, axis=1, kind="stable")[:, :NEIGHBOURS]


def found(row_ND, label_N, num_classes=None):
    return find_changes(row_ND, label_N, neighbours(row_ND), num_classes or int(label_N.max()) + 1)


def unit(row_D):
    return row_D / np.linalg.norm(row_D)


def mixed(near, label_N, a, b) -> float:
    """Returns the share of neighbours of the other class, in parts of that of a coin's."""
    members, cross, seen = [i for i in range(len(label_N)) if label_N[i] in (a, b)], 0, 0
    for i in members:
        inside = [j for j in near[i] if label_N[j] in (a, b)][: int(NEAREST * (len(members) - 1))]
        cross, seen = cross + sum(label_N[j] != label_N[i] for j in inside), seen + len(inside)
    num_a, num_b = (sum(label_N == label) for label in (a, b))
    return cross / seen / (2 * num_a * num_b / (len(members) * (len(members) - 1)))


def lowest(pairs) -> dict[int, int]:
    """Returns class -> the lowest that it is one with, for those in the pairs."""
    pairs, of = list(pairs), {}
    for a, b in pairs * len(pairs):
        of[a] = of[b] = min(of.get(a, a), of.get(b, b))
    return of


def by_loops(row_ND, label_N):
    """Returns (pairs of classes that are one, image -> class that it moves to, or None)."""
    row_ND, near = row_ND.astype(np.float64), neighbours(row_ND)
    several = [label for label, count in Counter(label_N.tolist()).items() if count > 1]
    one = {pair for pair in itertools.combinations(sorted(several), 2)
           if any(label_N[j] == pair[1] for i in np.flatnonzero(label_N == pair[0]) for j in near[i])
           and mixed(near, label_N, *pair) >= ONE}  # fmt: skip
    group = lowest(one)
    class_N = np.array([group.get(label, label) for label in label_N.tolist()])
    sums = {label: row_ND[class_N == label].sum(axis=0) for label in set(class_N.tolist())}

    def voted(i, but=()):
        votes = Counter(class_N[j] for j in near[i] if j not in but).most_common()
        return votes[0] if votes else (-1, 0)

    suspects = set()
    for i, label in enumerate(class_N):
        other, votes = voted(i)
        if (class_N == label).sum() > 1 and votes >= VOTES and label not in class_N[near[i]]:
            own = row_ND[i] @ unit(sums[label] - row_ND[i])
            suspects |= {i} if row_ND[i] @ unit(sums[other]) - own >= GAP else set()
    trusted = np.array([i not in suspects for i in range(len(class_N))])
    moves = {}
    for i in suspects:
        to, votes = voted(i, suspects)
        cosine = {c: row_ND[i] @ unit(row_ND[trusted & (class_N == c)].sum(axis=0))
                  for c in {class_N[j] for j in near[i] if trusted[j]}}  # fmt: skip
        rest = max((value for c, value in cosine.items() if c != to), default=-1)
        moves[i] = int(to) if votes >= VOTES and cosine[to] - rest >= MARGIN else None
    return one, moves


@pytest.mark.parametrize("seed", range(3))
def test_equal_to_loops_in_float64(seed):
    row_ND, truth_N = embeddings(seed, spread=0.17)
    rng = np.random.default_rng(seed + 10)
    label_N = np.where(rng.random(len(truth_N)) < 0.2, rng.integers(0, C, len(truth_N)), truth_N)
    label_N = np.where((label_N < 6) & (rng.random(len(label_N)) < 0.5), label_N + C, label_N)
    one, moves = by_loops(row_ND, label_N)
    changes = found(row_ND, label_N)
    assert len(one) >= 4
    group = lowest(one)
    assert lowest((c.label, c.to) for c in changes if c.action == "merge") == group
    assert len(moves) > 20
    got = {c.image: group.get(c.to, c.to) for c in changes if c.action in ("move", "drop")}
    assert got == {i: -1 if to is None else group.get(to, to) for i, to in moves.items()}
    assert all(c.label == label_N[c.image] for c in changes if c.action in ("move", "drop"))


def test_each_kind_is_found_and_nothing_else():
    row_ND, truth_N = embeddings(0)
    assert found(row_ND, truth_N) == []
    label_N = truth_N.copy()
    label_N[[3, 57]] = 20, 21  # wrong
    label_N[60:70:2] = C  # class 6 is two
    label_N[80:90] = 7  # classes 7 and 8 are one
    changes = found(row_ND, label_N)
    assert {(c.action, c.image, c.label, c.to) for c in changes if c.action != "split"} == {
        ("merge", -1, C, 6), ("move", 3, 20, 0), ("move", 57, 21, 5)
    }  # fmt: skip
    split = [c for c in changes if c.action == "split"]
    assert {c.label for c in split} == {7}
    assert {c.to for c in split} == {C + 1}
    assert sorted(c.image for c in split) in ([*range(70, 80)], [*range(80, 90)])


def test_classes_of_one_image_and_a_nobody():
    """A class of one image has no other to be unlike. An image that is nobody's is left out only where it is nearer to
    another class than to its own by far."""
    row_ND, label_N = embeddings(1)
    label_N = np.where(np.arange(len(label_N)) == 14, C, label_N)
    assert found(row_ND, label_N) == []
    half = unit(row_ND[0:10].sum(axis=0)) + unit(row_ND[20:30].sum(axis=0))
    row_ND[50] = unit(half)
    (nobody,) = found(row_ND, label_N)
    assert (nobody.action, nobody.image, nobody.label, nobody.to) == ("drop", 50, 5, -1)


def test_small_classes_are_not_one_because_nothing_else_is_near():
    """Two classes of two images each, all four nearest to one another."""
    row_ND, label_N = embeddings(2)
    some = np.r_[0:2, 10:12, 20:30]
    row_ND[10:12] = row_ND[10:12] + 2 * row_ND[0:2].mean(axis=0)
    row_ND /= np.linalg.norm(row_ND, axis=1, keepdims=True)
    assert found(row_ND[some], label_N[some]) == []


def test_a_part_of_few_images_is_no_class():
    row_ND, label_N = embeddings(3)
    strangers = embeddings(4)[0][: FEWEST - 1]
    row_ND[: FEWEST - 1] = strangers
    assert not [c for c in found(row_ND, label_N) if c.action == "split"]
    assert TWO < ONE
