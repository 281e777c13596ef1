"""Negative classes: a function of (seed, step, class), everyone's turn equally often."""

import itertools

import pytest
import torch

from partial_fc.head.selection.sampling import BLOCK, Draw
from partial_fc.head.shard import Shard


def drawn(sampling: Draw, step: int, size: int = 1) -> torch.Tensor:
    """All ranks' draws of a step, sorted."""
    shards = [Shard.of(sampling.num_classes, rank, size) for rank in range(size)]
    parts = [sampling.negatives(step, shard) for shard in shards]
    for part, shard in zip(parts, shards, strict=True):
        assert ((part >= shard.start) & (part < shard.stop)).all()
    return torch.cat(parts).sort().values


@pytest.mark.parametrize("num_classes", [1, 2, 7, 1000, BLOCK, BLOCK + 1, 3 * BLOCK + 777])
@pytest.mark.parametrize("rate", [0.1, 0.37, 0.999])
def test_the_number_of_ranks_does_not_change_the_draw(num_classes, rate):
    sampling = Draw(num_classes, rate, seed=4)
    for step in (0, 1, 9, 1234567):
        alone = drawn(sampling, step)
        for size in (2, 3, 8):
            assert torch.equal(drawn(sampling, step, size), alone)


def test_ascending_and_once_each():
    for rate in (0.003, 0.1, 0.37, 0.6, 1.0):
        for step in range(5):
            class_S = Draw(3 * BLOCK + 50, rate, 0).negatives(step, Shard.of(3 * BLOCK + 50, 0, 1))
            assert class_S.dtype == torch.int64
            assert (class_S.diff() > 0).all()
    assert len(drawn(Draw(BLOCK + 5, 1.0, 0), 3)) == BLOCK + 5


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.37])
def test_every_block_gives_its_share_in_every_step(rate):
    num_classes = 10 * BLOCK + 1000
    for step in range(25):
        count = torch.bincount(drawn(Draw(num_classes, rate, 0), step) // BLOCK, minlength=11)
        assert (count[:10] - rate * BLOCK).abs().max() < 1
        assert abs(count[10] - rate * 1000) < 1


def test_blocks_take_turns_where_a_block_gives_a_class_only_now_and_then():
    """Half a class a block and step; whole blocks drawing in the same steps would give 0 or 2,000."""
    num_classes, rate = 2000 * BLOCK, 0.5 / BLOCK
    sampling = Draw(num_classes, rate, 0)
    for shard in (Shard.of(num_classes, 0, 1), Shard.of(num_classes, 2, 3)):
        counts = torch.tensor([len(sampling.negatives(step, shard)) for step in range(200)]).double()
        expected = rate * len(shard)
        assert abs(counts.mean() - expected) < 0.02 * expected
        assert (counts - expected).abs().max() < 0.5 * expected**0.5, "more even than by chance"


@pytest.mark.parametrize("num_classes", [7, 500, BLOCK, 2 * BLOCK + 50])
@pytest.mark.parametrize("rate", [0.1, 1 / 3, 0.05])
def test_every_class_has_its_turn_once_in_each_round(num_classes, rate):
    """Equal counts, not merely close ones: a property of the walk, not of luck. Blocks begin at steps of their own."""
    sampling = Draw(num_classes, rate, 1)
    n = sampling.steps_per_round
    assert n == round(1 / rate)
    steps = [drawn(sampling, step) for step in range(3 * n)]
    for begin in range(0, num_classes, BLOCK):
        size = min(BLOCK, num_classes - begin)
        here = [step[(step >= begin) & (step < begin + size)] - begin for step in steps]
        counts = torch.stack([torch.bincount(step, minlength=size) for step in here])
        for first in range(n):
            rounds = counts[first : first + 2 * n].view(2, n, size).sum(dim=1)
            if (rounds == 1).all():
                break
        else:
            pytest.fail(f"no step begins a round in the block at {begin}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_classes", "rate"),
    [(BLOCK, 0.37), pytest.param(50, 0.37, marks=pytest.mark.long), (7, 0.6), (2 * BLOCK + 5, 0.15)],
)
def test_every_class_is_a_negative_equally_often(num_classes, rate):
    """Where rounds leave classes over: in the mean of many rounds. A class is in at most one step of a round, so its
    count has less variance than with independent draws; five standard deviations."""
    num_steps = 1000 if num_classes < 100 else 600
    sampling = Draw(num_classes, rate, 1)
    count = sum(torch.bincount(drawn(sampling, step), minlength=num_classes) for step in range(num_steps))
    expected = rate * num_steps
    assert abs(count.double().mean() - expected) < 0.005 * expected
    assert (count - expected).abs().max() < 5 * (expected * (1 - rate)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", [200, pytest.param(BLOCK, marks=pytest.mark.long)])
def test_two_classes_meet_as_often_as_chance_says(num_classes):
    """Pairs within a block: drawn together with probability about rate squared."""
    rate, num_steps, watched = 0.2, 1500, 200
    member = torch.zeros(num_steps, num_classes)
    for step in range(num_steps):
        member[step, drawn(Draw(num_classes, rate, 3), step)] = 1
    member = member[:, :watched]
    together = (member.T @ member) / num_steps
    off_diagonal = together[~torch.eye(watched, dtype=torch.bool)]
    expected = rate * (rate * num_classes - 1) / (num_classes - 1)
    deviation = (expected * (1 - expected) / num_steps) ** 0.5
    assert abs(off_diagonal.mean() - expected) < 0.001
    assert off_diagonal.std() < 1.2 * deviation
    assert (off_diagonal - expected).abs().max() < 6 * deviation


def test_steps_seeds_and_shards_draw_differently():
    num_classes = 8 * BLOCK
    first = drawn(Draw(num_classes, 0.1, 0), 0)
    for other in (drawn(Draw(num_classes, 0.1, 1), 0), drawn(Draw(num_classes, 0.1, 0), 10)):
        shared = len(set(first.tolist()) & set(other.tolist()))
        assert abs(shared / len(first) - 0.1) < 0.03
    blocks = [set((first[first // BLOCK == i] % BLOCK).tolist()) for i in range(8)]
    for i in range(8):
        for j in range(i):
            assert len(blocks[i] & blocks[j]) < 0.2 * len(blocks[i]), "two blocks draw the same places"


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
