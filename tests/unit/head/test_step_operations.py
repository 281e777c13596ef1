"""How the ranks' batches come together. (How much of a step is not its kernel: tests/gpu/test_step.py.)"""

import pytest
import torch

from partial_fc.head import CosFace, PartialFC
from tests.flat import learn
from tests.unit.thread_world import in_world

D = 16


def batches(num: int):
    generator = torch.Generator().manual_seed(3)
    for _ in range(num):
        feat = torch.randn(24, D, generator=generator)
        yield feat.requires_grad_(), torch.randint(0, 50, (24,), generator=generator)


@pytest.mark.parametrize("asks", [False, True])
def test_ranks_may_bring_other_numbers_of_rows_than_before(asks):
    """How a batch is made up is a guess from the last one: also where only ranks, but not their sum, have changed."""

    def train(world):
        world.asks_for_counts = asks  # as over torch.distributed
        losses, gradients = [], []
        head = PartialFC(50, D, CosFace(), 0.5, world)
        for (feat, label), rows in zip(batches(4), ([12, 12], [12, 12], [8, 16], [0, 24]), strict=True):
            part = slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1])) if world.size > 1 else slice(None)
            leaf = feat.detach()[part].requires_grad_()
            losses.append(learn(head, leaf, label[part]).item())
            gradients.append(leaf.grad)
        bad = torch.tensor([0, 50 if world.rank == world.size - 1 else 49])
        with pytest.raises(ValueError, match=f"label 50 at index 1 of rank {world.size - 1}'s batch is outside"):
            head(torch.randn(2, D), bad)
        # Gathered again: [8, 16] and [0, 24], after which it is no guess to go by; alone, the bad batch.
        assert world.traffic.calls["head/gather"] == 5 + (world.size if asks else 0)
        return losses, gradients

    ((alone, whole),) = in_world(1, train)
    by_rank = in_world(2, train)
    for losses, _ in by_rank:
        assert losses == pytest.approx(alone, rel=1e-6)
    for step, expected in enumerate(whole):
        found = torch.cat([gradients[step] for _, gradients in by_rank])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
