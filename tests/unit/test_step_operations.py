"""How much of a step of the head is not its kernel: on a GPU every operation is a launch, and at every number that the
host looks at it waits for the device."""

import pytest
import torch

from partial_fc.head import CosFace, HardNegatives, PartialFC
from partial_fc.head.active_rows import RowSelector
from partial_fc.head.rows import RowSGD, RowTable, Storage
from partial_fc.head.sampling import BLOCK, Sampling
from partial_fc.head.shard import Shard
from tests.unit.operations import Operations
from tests.unit.thread_world import in_world

D, CLASSES = 16, 2 * BLOCK + 50


def batches(num: int, num_classes: int = CLASSES):
    generator = torch.Generator().manual_seed(3)
    for _ in range(num):
        feat = torch.randn(24, D, generator=generator)
        yield feat.requires_grad_(), torch.randint(0, num_classes, (24,), generator=generator)


def as_on_a_device(head: PartialFC) -> PartialFC:
    head._selector.fixed_shapes = True
    return head


# Before, with the same counter: 300 operations and 16 numbers at rate 0.1, 96 and 4 at rate 1.
@pytest.mark.parametrize(("rate", "most"), [(1.0, 58), (0.1, 75)])
def test_operations_and_waits_of_a_step(rate, most):
    head = as_on_a_device(PartialFC(CLASSES, D, CosFace(), rate, impl="cpu", precision="fp32"))
    operations = Operations()
    # What a GPU's kernel does of its own is not the matter here; it updates the rows, too.
    operations.leave_out((head.kernel, "sums"), (head.kernel, "update"))
    for number, (feat, label) in enumerate(batches(20 + 32)):
        if number < 20:  # all rows have been created
            head(feat, label).backward()
            head.step(0.1)
            continue
        with operations:
            head(feat, label).backward()
            head.step(0.1)
    assert operations.count / 32 <= most, operations.names
    # (The draw for 32 steps looks at three numbers of the host.)
    assert operations.waits.total() == 32 + (3 if rate < 1 else 0), operations.waits


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("num_classes", "rate"), [(CLASSES, 0.1), (2, 0.5), (BLOCK, 0.37), (3 * BLOCK, 0.001)])
def test_draws_made_ahead_are_those_of_their_steps(num_classes, rate, rank):
    shard, sampling = Shard.of(num_classes, rank, 3), Sampling(num_classes, rate, 5)
    ahead = sampling.ahead(7, 12, shard, torch.device("cpu"))
    for step, drawn in enumerate(ahead, start=7):
        assert torch.equal(drawn[:3], torch.tensor((-2, -1, len(shard))))
        ascending = drawn[3:].sort().values
        assert torch.equal(ascending[ascending < len(shard)], sampling.negatives(step, shard) - shard.start)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("num_classes", [2, 500, CLASSES])
@pytest.mark.parametrize("hard", [False, True])
def test_a_devices_selection_is_the_hosts(num_classes, rank, hard):
    shard = Shard.of(num_classes, rank, 3)
    table = RowTable(2 * shard.start, 2 * len(shard), 4, 0, RowSGD(), Storage(), "cpu")
    lists = HardNegatives(num_classes, k=2) if hard else None
    if lists is not None:
        generator = torch.Generator().manual_seed(1)
        near = torch.randint(-1, num_classes, (num_classes, 2), generator=generator, dtype=torch.int32)
        lists.load_state({"owner": torch.arange(num_classes, dtype=torch.int32), "near": near})
    host, device = (
        RowSelector(Sampling(num_classes, 0.1, 2), shard, 2, table, lists, True, torch.float32) for _ in range(2)
    )
    device.fixed_shapes = True
    for step, (_, label) in enumerate(batches(40, num_classes)):
        (rows, bias), (expected_rows, expected_bias) = (selected(each, label, step) for each in (device, host))
        assert torch.equal(rows, expected_rows)
        assert torch.equal(bias, expected_bias)


def selected(selector: RowSelector, label: torch.Tensor, step: int):
    chosen = selector.choose(label, selector.shard.locate(label), step)
    active = selector.fetch(chosen, None if chosen.count is None else int(chosen.count), step)
    return active.rows, active.bias_S


@pytest.mark.parametrize("asks", [False, True])
def test_ranks_may_bring_other_numbers_of_rows_than_before(asks):
    """How a batch is made up is a guess from the last one: also where only ranks, but not their sum, have changed."""

    def train(world):
        world.asks_for_counts = asks  # as over torch.distributed
        losses, gradients = [], []
        head = PartialFC(50, D, CosFace(), 0.5, world)
        for (feat, label), rows in zip(batches(4, 50), ([12, 12], [12, 12], [8, 16], [0, 24]), strict=True):
            part = slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1])) if world.size > 1 else slice(None)
            leaf = feat.detach()[part].requires_grad_()
            loss = head(leaf, label[part])
            loss.backward()
            head.step(0.1)
            losses.append(loss.item())
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
