"""Hard negatives: the nearest classes are found, kept and forgotten; memory does not grow."""

import pytest
import torch

from partial_fc.head.selection import hard_negatives
from partial_fc.head.selection.hard_negatives import HardNegatives
from tests import head_reference as reference

C, D = 3000, 16


def problem(num_classes: int = C) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, labels, centres; the twin of class c is class num_classes - 1 - c."""
    generator = torch.Generator().manual_seed(0)
    centre_CD = torch.randn(num_classes, D, generator=generator)
    half = num_classes // 2
    centre_CD[num_classes - half :] = centre_CD[:half].flip(0) + 0.1 * torch.randn(half, D, generator=generator)
    label_G = torch.randint(0, num_classes, (24,), generator=generator)
    feat_GD = centre_CD[label_G] + 0.1 * torch.randn(24, D, generator=generator)
    return reference.unit(feat_GD), label_G, centre_CD


def near(lists: HardNegatives, label_G: torch.Tensor) -> torch.Tensor:
    """The classes that are listed for these, ascending, each once."""
    listed = lists.listed(label_G).unique()
    return listed[listed >= 0]


@pytest.mark.parametrize("chunk", [1, 700, 10_000])
@pytest.mark.parametrize("k", [1, 5])
def test_lists_are_the_nearest_of_other_classes(monkeypatch, chunk, k):
    monkeypatch.setattr(hard_negatives, "_CHUNK", chunk)
    num_classes = 200 if chunk == 1 else C
    unit_GD, label_G, centre_CD = problem(num_classes)
    lists = HardNegatives(num_classes, k)
    lists.learn(label_G, unit_GD, centre_CD, None, torch.arange(num_classes), step=0)
    cos_GC = unit_GD @ reference.unit(centre_CD).T
    cos_GC[torch.arange(len(label_G)), label_G] = -2.0
    for g, label in enumerate(label_G):
        if label not in label_G[:g]:
            found = near(lists, label[None])
            assert torch.equal(found, cos_GC[g].topk(k).indices.sort().values)
            assert label not in found


def test_a_rows_other_labels_are_not_listed():
    """They take part anyway; the lists would be full of them where labels are clusters that lie side by side."""
    unit_GD, label_G, centre_CD = problem()
    cos_GC = unit_GD @ reference.unit(centre_CD).T
    label_GT = torch.cat([label_G[:, None], cos_GC.scatter(1, label_G[:, None], -2.0).topk(3).indices], dim=1)
    lists = HardNegatives(C, k=2)
    lists.learn(label_GT, unit_GD, centre_CD, None, torch.arange(C), step=0)
    nearest_GK = cos_GC.scatter(1, label_GT, -2.0).topk(2).indices
    assert torch.equal(near(lists, label_GT[0, 1:2]), nearest_GK[0].sort().values)
    assert torch.equal(near(lists, label_G[:1]), nearest_GK[0].sort().values)


def test_a_centre_that_moves_away_is_forgotten():
    unit_GD, label_G, centre_CD = problem()
    label_G, unit_GD = label_G[:1], unit_GD[:1]
    twin = C - 1 - label_G
    lists = HardNegatives(C, k=1, every=1)
    lists.learn(label_G, unit_GD, centre_CD, None, torch.arange(C), step=0)
    assert torch.equal(near(lists, label_G), twin)
    centre_CD[twin] *= -1
    lists.learn(label_G, unit_GD, centre_CD, None, torch.arange(C), step=1)
    assert not torch.equal(near(lists, label_G), twin)


def test_learns_only_in_every_nth_step_and_repeats():
    unit_GD, label_G, centre_CD = problem()
    first, second = HardNegatives(C, 3, every=4), HardNegatives(C, 3, every=4)
    for step in (1, 2, 3):
        first.learn(label_G, unit_GD, centre_CD, None, torch.arange(C), step)
    assert len(near(first, label_G)) == 0
    for lists in (first, second):
        lists.learn(label_G, unit_GD, centre_CD, None, torch.arange(C), step=4)
    assert len(near(first, label_G)) > 24
    assert all(torch.equal(mine, second.state()[name]) for name, mine in first.state().items())


def test_sub_centres_count_through_the_nearest():
    unit_GD, label_G, centre_CD = problem()
    label_G, unit_GD = label_G[:1], unit_GD[:1]
    several_CD = torch.randn(C, 3, D, generator=torch.Generator().manual_seed(1)) * 1e-3 - centre_CD[label_G]
    several_CD[:, 1] = centre_CD
    lists = HardNegatives(C, k=2)
    lists.learn(label_G, unit_GD, several_CD.flatten(0, 1), None, torch.arange(C), step=0)
    plain = HardNegatives(C, k=2)
    plain.learn(label_G, unit_GD, centre_CD, None, torch.arange(C), step=0)
    assert torch.equal(near(lists, label_G), near(plain, label_G))
    assert (C - 1 - label_G) in near(lists, label_G)


def test_memory_is_bounded_and_a_shared_slot_never_gives_anothers_list():
    num_classes, capacity = 2_000_000_000, 64
    lists = HardNegatives(num_classes, k=4, every=1, capacity=capacity)
    num_bytes = sum(t.nbytes for t in lists.state().values())
    assert num_bytes == capacity * 4 * (4 + 1)
    _, _, centre_CD = problem()
    generator = torch.Generator().manual_seed(3)
    class_S = torch.randint(0, num_classes, (C,), generator=generator).unique()
    place_G = torch.randint(0, len(class_S), (500,), generator=generator)
    feat_GD = reference.unit(centre_CD[place_G])
    lists.learn(class_S[place_G], feat_GD, centre_CD, torch.arange(len(class_S)), class_S, step=0)
    assert sum(t.nbytes for t in lists.state().values()) == num_bytes
    cos_GC = feat_GD @ reference.unit(centre_CD[: len(class_S)]).T
    cos_GC[torch.arange(500), place_G] = -2.0
    kept = 0
    for g in range(500):
        found = near(lists, class_S[place_G[g : g + 1]])
        if len(found):
            kept += 1
            assert torch.equal(found, class_S[cos_GC[g].topk(4).indices].sort().values)
    assert 50 < kept < 90, "nearly every slot is in use, and some classes stand twice in the batch"


def test_fewer_candidates_than_k_and_none():
    unit_GD, label_G, centre_CD = problem()
    lists = HardNegatives(C, k=5)
    few = torch.tensor([1, 2, 7])
    lists.learn(torch.tensor([2]), unit_GD[:1], centre_CD, few, few, step=0)
    assert near(lists, torch.tensor([2])).tolist() == [1, 7]
    lists.learn(label_G, unit_GD, centre_CD[:0], few[:0], few[:0], step=0)
    assert near(lists, torch.tensor([2])).tolist() == [1, 7], "nothing to compare with: unchanged"


@pytest.mark.parametrize(
    ("given", "words"),
    [((C, 0), "at least 1"), ((C, 1, 0), "at least 1"), ((C, 1, 1, 0), "at least 1"), ((1 << 31, 1), "too many")],
)
def test_refuses_less_than_one_and_more_classes_than_32_bits_number(given, words):
    with pytest.raises(ValueError, match=words):
        HardNegatives(*given)
