"""Negative classes: a function of (seed, step, class), everyone's turn equally often."""

import itertools

import pytest
import torch

from partial_fc.head.sampling import BLOCK, Sampling
from partial_fc.head.shard import Shard


def drawn(sampling: Sampling, step: int, size: int = 1) -> torch.Tensor:
    """All ranks' draws of a step, sorted."""
    shards = [Shard.of(sampling.num_classes, rank, size) for rank in range(size)]
    parts = [sampling.negatives(step, shard) for shard in shards]
    for part, shard in zip(parts, shards, strict=True):
        assert ((part >= shard.start) & (part < shard.stop)).all()
    return torch.cat(parts).sort().values


@pytest.mark.parametrize("num_classes", [1, 2, 7, 1000, BLOCK, BLOCK + 1, 3 * BLOCK + 777])
@pytest.mark.parametrize("rate", [0.1, 0.37, 0.999])
def test_the_number_of_ranks_does_not_change_the_draw(num_classes, rate):
    sampling = Sampling(num_classes, rate, seed=4)
    for step in (0, 1, 9, 1234567):
        alone = drawn(sampling, step)
        for size in (2, 3, 8):
            assert torch.equal(drawn(sampling, step, size), alone)


def test_the_share_of_classes_is_the_rate():
    num_classes = 10 * BLOCK + 100
    for rate in (0.01, 0.1, 0.5):
        counts = [len(drawn(Sampling(num_classes, rate, 0), step)) for step in range(20)]
        assert max(abs(count - rate * num_classes) for count in counts) <= 12, "at most one class a block off"


@pytest.mark.parametrize("num_classes", [7, 500, BLOCK, 2 * BLOCK + 50])
def test_every_class_is_a_negative_equally_often(num_classes):
    """After whole rounds the counts are equal, not merely close: a property of the walk, not of luck."""
    rate, rounds = 0.1, 3
    count = torch.zeros(num_classes, dtype=torch.int64)
    for step in range(round(rounds / rate)):
        count += torch.bincount(drawn(Sampling(num_classes, rate, 1), step), minlength=num_classes)
    assert count.min() == count.max() == rounds


def test_two_classes_meet_as_often_as_chance_says():
    """Pairs within a block: drawn together with probability about rate squared."""
    num_classes, rate, num_steps = 200, 0.2, 2000
    member = torch.zeros(num_steps, num_classes)
    for step in range(num_steps):
        member[step, drawn(Sampling(num_classes, rate, 3), step)] = 1
    together = (member.T @ member) / num_steps
    off_diagonal = together[~torch.eye(num_classes, dtype=torch.bool)]
    expected = rate * (rate * num_classes - 1) / (num_classes - 1)
    assert abs(off_diagonal.mean() - expected) < 0.001
    assert off_diagonal.std() < 1.3 * (expected * (1 - expected) / num_steps) ** 0.5


def test_steps_seeds_and_shards_draw_differently():
    num_classes = 8 * BLOCK
    first = drawn(Sampling(num_classes, 0.1, 0), 0)
    for other in (drawn(Sampling(num_classes, 0.1, 1), 0), drawn(Sampling(num_classes, 0.1, 0), 10)):
        shared = len(set(first.tolist()) & set(other.tolist()))
        assert abs(shared / len(first) - 0.1) < 0.03
    blocks = (first.view(8, -1) % BLOCK).tolist()
    for i in range(8):
        for j in range(i):
            assert len(set(blocks[i]) & set(blocks[j])) < 0.2 * len(blocks[i]), (
                "two blocks draw the same places"
            )


def test_a_step_does_not_need_the_steps_before_it():
    sampling = Sampling(12345, 0.1, 0)
    in_order = [drawn(sampling, step) for step in range(30)]
    for step in (29, 3, 17):
        assert torch.equal(drawn(Sampling(12345, 0.1, 0), step), in_order[step])


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.1])
def test_rates_that_are_no_share(rate):
    with pytest.raises(ValueError, match="sample_rate"):
        Sampling(100, rate, 0)


def test_shards_cover_all_classes_once():
    for num_classes in (1, 2, 5, 100, 101):
        for size in (1, 2, 3, 7):
            shards = [Shard.of(num_classes, rank, size) for rank in range(size)]
            assert shards[0].start == 0
            assert shards[-1].stop == num_classes
            assert all(a.stop == b.start for a, b in itertools.pairwise(shards))
            assert max(len(s) for s in shards) - min(len(s) for s in shards) <= 1
    with pytest.raises(ValueError, match="num_classes is 0"):
        Shard.of(0, 0, 1)
