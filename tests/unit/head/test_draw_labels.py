"""The draw of some of a row's labels."""

import pytest
import torch

from partial_fc.head import draw_labels


def test_each_label_is_drawn_as_often_and_none_twice():
    label_BK = torch.arange(100).expand(64, 100)
    count_K = torch.zeros(100)
    for step in range(200):
        place_BN = draw_labels(label_BK, 8, torch.arange(64), step)
        assert all(len(set(row)) == 8 for row in place_BN.tolist())
        count_K += torch.bincount(place_BN.flatten(), minlength=100)
    expected = 200 * 64 * 8 / 100
    assert ((count_K - expected) ** 2 / expected).sum() < 150  # chi-squared of 99 degrees: above that once in 1,000


def test_it_depends_on_seed_step_and_sample_alone():
    label_BK, sample_B = torch.arange(20).expand(6, 20), torch.tensor([0, 1, 5, 2**40, 2**40 + 5, 3])
    drawn = draw_labels(label_BK, 4, sample_B, 7, 3)
    assert torch.equal(drawn[2:4], draw_labels(label_BK[:2], 4, sample_B[2:4], 7, 3))
    others = [draw_labels(label_BK, 4, sample_B, 8, 3), draw_labels(label_BK, 4, sample_B, 7, 4), drawn.roll(1, 0)]
    for other in others:
        assert (other != drawn).any(dim=1).all()


def test_what_is_no_label_comes_last():
    label_BK = torch.tensor([[-100, 7, -100, 9, 11], [1, 2, 3, 4, 5]])
    drawn = label_BK.gather(1, draw_labels(label_BK, 4, torch.arange(2), 0))
    assert sorted(drawn[0, :3].tolist()) == [7, 9, 11]
    assert drawn[0, 3] == -100


@pytest.mark.parametrize("num_drawn", [0, 6])
def test_too_many_are_refused(num_drawn):
    with pytest.raises(ValueError, match=rf"{num_drawn} labels drawn of labels \(2, 5\).*expected 1 to 5"):
        draw_labels(torch.zeros(2, 5), num_drawn, torch.arange(2), 0)
