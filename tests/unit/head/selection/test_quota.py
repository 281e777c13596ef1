"""InsightFace's quota: as many classes as the sample rate says, those of the batch among them."""

import pytest
import torch

from partial_fc.head import CosFace, HardNegatives
from partial_fc.head.selection.active_rows import insert
from partial_fc.head.selection.quota import within_quota
from partial_fc.head.selection.sampling import BLOCK, Draw
from partial_fc.head.shard import Shard
from tests.flat import flat_head

D = 8


def active(sampling: Draw, label_G: torch.Tensor, step: int, size: int = 1) -> torch.Tensor:
    """The classes that take part on all ranks."""
    parts = []
    for rank in range(size):
        shard = Shard.of(sampling.num_classes, rank, size)
        drawn = sampling.negatives(step, shard)
        class_N = within_quota(sampling, drawn, label_G, step, shard)
        assert torch.isin(class_N, drawn).all()
        parts.append(insert(class_N, torch.unique(label_G[(label_G >= shard.start) & (label_G < shard.stop)])))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("num_classes", "rate", "batch"),
    [
        (1, 0.5, 3),
        (1000, 0.1, 256),  # more classes in the batch than the rate gives
        (10_000, 0.1, 1024),  # nearly as many, so that some blocks have more and others fewer
        (3 * BLOCK + 777, 0.37, 500),
        (20 * BLOCK, 0.0001, 5),
        (600_000, 0.1, 1024),
    ],
)
def test_so_many_classes_whatever_the_number_of_ranks(num_classes, rate, batch):
    """max(classes of the batch, rate * classes), which arcface_torch has with one process."""
    sampling = Draw(num_classes, rate, 4, "insightface")
    for step in (0, 1, 12345):
        label_G = torch.randint(num_classes, (batch,), generator=torch.Generator().manual_seed(step))
        alone = active(sampling, label_G, step)
        drawn = len(sampling.negatives(step, Shard.of(num_classes, 0, 1)))
        assert drawn == sampling.counts(step).sum()
        assert abs(drawn - rate * num_classes) < 2 + num_classes / BLOCK
        assert len(alone) == max(len(label_G.unique()), drawn)
        assert (alone.diff() > 0).all()
        assert torch.isin(label_G, alone).all()
        for size in (2, 3, 8):
            assert torch.equal(active(sampling, label_G, step, size), alone)


def test_a_block_that_the_batch_fills_takes_from_all_others_alike():
    num_classes, rate = 8 * BLOCK, 0.1
    sampling = Draw(num_classes, rate, 0, "insightface")
    counts = torch.bincount(active(sampling, torch.arange(1000), 3) // BLOCK, minlength=8)
    assert counts[0] == 1000
    assert counts.sum() == sampling.counts(3).sum()
    assert counts[1:].max() - counts[1:].min() <= 2


def test_the_other_classes_are_negatives_equally_often():
    """Whole numbers that are left out at equal distances: nobody's place is spared."""
    num_classes, num_steps = 400, 320
    sampling = Draw(num_classes, 0.25, 1, "insightface")
    label_G = torch.arange(0, 160, 2)
    count = torch.zeros(num_classes)
    for step in range(num_steps):
        count[active(sampling, label_G, step)] += 1
    others = torch.ones(num_classes, dtype=torch.bool)
    others[label_G] = False
    assert (count[label_G] == num_steps).all()
    expected = num_steps * (100 - 80) / 320
    assert abs(count[others].mean() - expected) < 1e-3
    assert (count[others] - expected).abs().max() < 5 * expected**0.5


def test_hard_negatives_come_on_top():
    lists = HardNegatives(300, k=2, every=1)
    head = flat_head(300, D, CosFace(), 0.1, hard_negatives=lists, quota="insightface")
    label = torch.arange(20)
    for _ in range(2):
        head(torch.randn(20, D).requires_grad_(), label).backward()
        found = len(head.pending[0].rows)
        head.step(0.0)
    assert 30 < found <= 30 + 2 * 20
